"""Turns on disk: they outlive SIGKILL, and an agent that begins anew is answered as it was."""

import asyncio
import contextlib
import os
import signal

import numpy as np
import openai
import pytest

from primeblocks.attachments import Aligned
from primeblocks.capture import CaptureJournal, Conversation
from primeblocks.errors import CapacityError, UnsupportedError
from tests.capture.capture_site import adds, converse, recording
from tests.capture.chat_site import Engine, template


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    async def run(journal, engine, rounds):
        async with recording(engine, journal=journal, name="s") as (_, session, client):
            await converse(client, [], rounds, stream=False)
        return session

    engine = Engine(adds)
    with CaptureJournal(tmp_path / "turns") as journal:
        before = asyncio.run(run(journal, engine, 2))
    with CaptureJournal(tmp_path / "turns") as journal:
        assert journal.sessions() == ["s"]
        (kept,) = journal.load("s").rollouts()
        after = asyncio.run(run(journal, engine, 3))
        (again,) = journal.load("s").rollouts()
        journal.forget("s")
        assert journal.sessions() == []
    assert engine.calls == 6
    (first,), (second,) = before.rollouts(), after.rollouts()
    for one, other in ((first, kept), (second, again)):
        for name in ("tokens", "logprobs", "versions", "loss_mask"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert second.tokens.tolist()[: len(first.tokens)] == first.tokens.tolist()
    engine.check([second])
    engine.check([again])


def test_turns_outlive_sigkill(tmp_path):
    async def run(journal, engine):
        async with recording(engine, journal=journal, name="s") as (_, session, client):
            await converse(client, [], 2, stream=False)
        return session

    async def dies(prompt, **options):
        if engine.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return await engine(prompt, **options)

    engine = Engine(adds)
    template()
    child = os.fork()
    if child == 0:
        asyncio.run(run(CaptureJournal(tmp_path / "turns"), dies))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with CaptureJournal(tmp_path / "turns") as journal:
        kept = journal.load("s")
        assert len(kept.turns) == 3
        after = asyncio.run(run(journal, engine))
    # Of a restart: answered as before the kill, then asked.
    assert engine.calls == 1
    assert len(after.conversation.turns) == 4
    whole = asyncio.run(run(None, Engine(adds)))
    for one in (kept.rollouts()[0], after.rollouts()[0]):
        count = len(kept.rollouts()[0].tokens)
        assert one.tokens[:count].tolist() == whole.rollouts()[0].tokens[:count].tolist()


def test_a_turn_that_cannot_be_written_is_said_and_leaves_a_journal_that_can_be_read(tmp_path):
    async def run(journal):
        engine = Engine(lambda prompt: "well")
        async with recording(engine, journal=journal, name="s") as (_, session, client):
            messages = []
            for i in range(3):
                messages.append({"role": "user", "content": "a"})
                with contextlib.ExitStack() as stack:
                    if i == 1:
                        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                            journal._database, "transaction", full
                        )
                        stack.enter_context(pytest.raises(openai.RateLimitError, match="no room"))
                    await client.chat.completions.create(model="m", messages=messages)
                messages.append({"role": "assistant", "content": "well"})
        return engine, session

    def full():
        raise CapacityError("no room on the disk")

    with CaptureJournal(tmp_path / "turns") as journal:
        engine, session = asyncio.run(run(journal))
        kept = journal.load("s")
    # The turn is recorded; the journal lacks it.
    assert [len(each.turns) for each in (session.conversation, kept)] == [3, 2]
    engine.check(session.rollouts())
    for rollout in kept.rollouts():
        rows = rollout.attachments["routed_experts"]
        assert (rows.start, rows.stop) == (0, len(rollout.tokens) - 1)


@pytest.mark.parametrize("reopens", [False, True])
@pytest.mark.parametrize("turns", ["rr", "-rr", "r-r", "-r-r", "rr-r", "r!r"])
def test_rows_on_disk_equal_rows_in_memory(tmp_path, turns, reopens):
    """Each turn has rows (r), lacks rows (-), or has a value that cannot be written (!)."""
    conversation, prompt = Conversation(), [1, 2]
    with CaptureJournal(tmp_path / "turns") as journal:
        journal.turns("s")
        for kind in turns:
            rows = {"routes": Aligned.rows(np.arange(len(prompt))[:, None])}
            values = {
                "logprobs": [-1.0],
                "versions": np.array([0]),
                "attachments": {"r": rows, "-": {}, "!": rows | {"value": object()}}[kind],
            }
            turn = conversation.append(prompt, [3], **values)
            with pytest.raises(UnsupportedError) if kind == "!" else contextlib.nullcontext():
                journal.append("s", turn, prompt, [3], **values)
            if reopens:
                journal.leave("s")
                journal.turns("s")
                conversation = journal.load("s")
            prompt = [*prompt, 3, 4]
        (kept,) = journal.load("s").rollouts()
    (wanted,) = conversation.rollouts()
    assert kept.tokens.tolist() == wanted.tokens.tolist()
    for rollout in (kept, wanted):
        routes = rollout.attachments["routes"]
        assert (routes.start, routes.stop) == (0, len(wanted.tokens) - 1)
        assert routes.value[:, 0].tolist() == list(range(routes.stop))
