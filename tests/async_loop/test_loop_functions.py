"""The loop and the functions that it is given: what it refuses, keeps, logs and says at its end."""

import asyncio
import functools
import itertools
import re
import threading

import pytest
import torch

from primeblocks.async_loop import AsyncLoop, Group, Journal, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.ledger import Partial
from primeblocks.errors import DeadlineError, UsageError
from primeblocks.planning.virtual import VirtualClock, run_in_virtual_time
from primeblocks.testing.faults import ManualClock
from tests.deadlines import HANG_S

from .conftest import make_rollout
from .test_loop import World, collect, make_loop, run


async def _any(prompt, *, version):
    return [make_rollout()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generate": None}, "generate= must be callable; got None"),
        ({"generate": lambda prompt, *, version: []}, "generate= must be async; .* async def"),
        ({"generate": _any, "group_size": 2}, r"generate\(prompt, version=, sample=\), .*'sample'"),
        ({"train": 3}, "train= must be callable; got 3"),
        ({"train": lambda groups: None}, r"train\(groups, version=\), .*'version'"),
        ({"publish": lambda: None}, r"publish\(version\)"),
        ({"keep": _any}, "keep= must be plain"),
        ({"keep": lambda: True}, r"keep\(group\)"),
        ({"source": "name"}, "source= must be callable"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_at_once(changes, message):
    world = World()
    good = {"generate": _any, "train": world.train, "publish": world.publish}
    with pytest.raises(UsageError, match=message):
        AsyncLoop(
            prompts=[],
            buffer=RolloutBuffer(capacity=2, staleness=StalenessPolicy(0)),
            batch_size=1,
            max_in_flight=1,
            **good | changes,
        )


def test_a_generate_that_takes_no_draft_is_refused_with_a_journal(tmp_path):
    world = World()
    with Journal(tmp_path / "journal") as journal, pytest.raises(UsageError, match="'draft'"):
        AsyncLoop(
            prompts=[], generate=_any, train=world.train, publish=world.publish, batch_size=1,
            buffer=RolloutBuffer(capacity=1, staleness=StalenessPolicy(0)), max_in_flight=1,
            ledger=journal,
        )  # fmt: skip


class Callable:
    async def __call__(self, *given, **named):
        return [make_rollout()]


def test_whatever_is_async_may_generate_train_and_publish():
    """Objects, parts of functions, and plain functions around async ones that train."""
    seen = []

    async def train(groups, *, version):
        await asyncio.sleep(0)
        seen.append(version)
        return "trained"

    class Trainer:
        async def __call__(self, groups, *, version):
            return await train(groups, version=version)

    async def body(generate, train):
        world = World()
        loop = AsyncLoop(
            prompts=itertools.count(), generate=generate, train=train, publish=world.publish,
            buffer=RolloutBuffer(capacity=1, staleness=StalenessPolicy(0)),
            batch_size=1, max_in_flight=1, version=0,
        )  # fmt: skip
        return await collect(world, loop, count=1)

    for generate in (_any, Callable(), functools.partial(Callable(), extra=1)):
        for trainer in (
            train,
            Trainer(),
            lambda groups, *, version: train(groups, version=version),
        ):
            (step,) = asyncio.run(asyncio.wait_for(body(generate, trainer), 120))
            assert step.metrics == "trained"
    assert seen == [0] * 9


def test_a_decorator_says_whether_a_function_is_async():
    """What it decorates does not: a publish in a thread is awaited before the next step trains."""
    said = []

    def in_a_thread(function):
        @functools.wraps(function)
        async def call(*given, **named):
            return await asyncio.to_thread(function, *given, **named)

        return call

    def handing_on(function):
        @functools.wraps(function)
        def call(*given, **named):
            return function(*given, **named)

        return call

    def blocking(function):
        return functools.wraps(function)(lambda *a, **named: asyncio.run(function(*a, **named)))

    async def train(groups, *, version):
        said.append(f"train {version}")

    def publish(version):
        said.append(f"publish {version} begins")
        threading.Event().wait(0.1)
        said.append(f"publish {version} ends")

    async def body():
        loop = AsyncLoop(
            prompts=itertools.count(), generate=handing_on(_any), train=blocking(train),
            publish=in_a_thread(publish), batch_size=1, max_in_flight=1, version=0,
            buffer=RolloutBuffer(capacity=1, staleness=StalenessPolicy(9, correction="a test")),
        )  # fmt: skip
        async with loop:
            return [step async for step in loop.steps(2)]

    assert len(asyncio.run(asyncio.wait_for(body(), 120))) == 2
    assert said == [
        *("train 0", "publish 1 begins", "publish 1 ends"),
        *("train 1", "publish 2 begins", "publish 2 ends"),
    ]


@pytest.mark.parametrize(
    ("group_size", "answer", "message"),
    [
        (None, make_rollout(), "returned a Rollout for prompt 0, 'x'. It must return an iterable"),
        (None, None, "returned a NoneType for prompt 0"),
        (None, [make_rollout(), None], "returned a list with a NoneType in it"),
        (None, "text", "returned a str with a str in it"),
        (2, [make_rollout()], "returned a list for prompt 0, 'x'. It must return one Rollout"),
        (2, None, "returned a NoneType"),
    ],
)
def test_what_a_rollout_function_returned_wrongly_is_named(group_size, answer, message):
    async def body(world, loop):
        async def generate(prompt, *, version, sample=0):
            return answer

        world.generate = generate
        with pytest.raises(UsageError, match=re.escape(message)):
            await collect(world, loop)

    run(body, group_size=group_size, prompts=["x"] * 9)


def end_waiting(until, **options):
    """Advance the clock beyond the deadline once `until(loop)` is true, and return the error."""

    async def main():
        world, clock = World(), ManualClock()
        loop = make_loop(world, step_timeout_s=7, clock=clock, **options)
        buffer = loop._buffer
        buffer._clock, buffer.capacity_bytes = clock, make_rollout().nbytes

        async def generate(prompt, *, version):
            return [make_rollout(versions=(0, 0))]

        world.generate = generate
        collecting = asyncio.create_task(collect(world, loop))
        while not until(loop):
            await asyncio.sleep(0)
        clock.advance(7)
        with pytest.raises(DeadlineError) as caught:
            await collecting
        return str(caught.value)

    return asyncio.run(asyncio.wait_for(main(), HANG_S))


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_groups_that_are_always_stale_are_counted_when_the_wait_for_them_ends(on_stale):
    said = end_waiting(lambda loop: loop._dropped > 4, bound=1, on_stale=on_stale)
    assert re.search(
        r"a batch of 2 groups did not end within 7 s: \d groups .* ([5-9]|\d\d+) other groups were "
        "dropped, .* policies are 0 to 0, but max_off_policy_steps=1 lets policy 2 train on "
        "policies from 1 on. Check the versions that generate records",
        said,
    )


def test_a_batch_that_waits_for_room_of_its_own_groups_says_what_to_raise():
    said = end_waiting(lambda loop: loop._buffer._waiting, batch_size=3, max_in_flight=1)
    assert "3 groups did not end within 7 s: 2 groups were finished. 1 of them waited" in said
    size = make_rollout().nbytes
    assert f"Raise capacity_bytes={size}, or make max_in_flight at least batch_size." in said
    assert "stale" not in said


def test_a_journal_is_resumed_with_its_prompts_and_says_what_is_trained_again(tmp_path, caplog):
    """Prompts that the journal still needs are compared; it says when it goes back."""
    ledger = Journal(tmp_path / "journal")
    for ordinal in range(3):
        ledger.drawn(ordinal, {"ids": [ordinal]})
        ledger.started(ordinal, 0)
    for ordinal in range(2):
        group = Group({"ids": [ordinal]}, (make_rollout(),), 0, 1.0, ordinal)
        ledger.finished(ordinal, group)
    ledger.taken([0], 0)
    ledger.trained(0)

    async def never(prompt, *, version, draft):
        await asyncio.Event().wait()

    async def quiet(*args, version=0):
        pass

    async def body(prompts, version):
        loop = AsyncLoop(
            prompts=prompts, generate=never, train=quiet, publish=quiet, batch_size=1,
            buffer=RolloutBuffer(capacity=9, staleness=StalenessPolicy(1, correction="a test")),
            max_in_flight=9, ledger=ledger, version=version,
        )  # fmt: skip
        async with loop:
            pass

    same = [{"ids": [ordinal]} for ordinal in range(3)]
    run_in_virtual_time(body(iter(same), 1))
    assert not caplog.records
    for wrong in (1, 2):
        others = [*same[:wrong], {"ids": [7]}, *same[wrong + 1 :]]
        run_in_virtual_time(body(others, 1))
        (record,) = caplog.records
        assert f"Prompt {wrong} is {{'ids': [7]}}, but the journal has" in record.getMessage()
        caplog.clear()
    ledger.taken([1], 1)  # The process ends in this step: nothing is trained again.
    run_in_virtual_time(body(same, 1))
    assert not caplog.records
    run_in_virtual_time(body(same, 0))
    assert [record.getMessage() for record in caplog.records] == [
        "The journal goes back to policy 0: 1 groups of later steps are trained again."
    ]


def test_train_runs_in_a_thread_with_the_loops_cuda_device(monkeypatch):
    here = threading.local()
    here.device = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(here, "device", device))
    world, seen = World(), []
    world.train = lambda groups, *, version: seen.append(here.device)
    asyncio.run(collect(world, make_loop(world), 2))
    assert seen == [3, 3]


def test_prompts_that_are_no_iterable_are_refused():
    with pytest.raises(UsageError, match="prompts= must be an iterable; got 5"):
        asyncio.run(collect(World(), make_loop(World(), prompts=5), 1))


def test_an_end_that_is_cancelled_ends_the_thread():
    async def generate(prompt, *, version):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()  # It does not let the loop's end go on.

    async def main():
        world = World()
        world.generate = generate
        loop = make_loop(world)
        stepping = asyncio.ensure_future(collect(world, loop, 1))
        await asyncio.sleep(0.01)
        thread = loop._worker._thread
        for _ in range(2):
            stepping.cancel()
            await asyncio.sleep(0.05)
        await asyncio.to_thread(thread.join, HANG_S)
        return thread.is_alive()

    assert not asyncio.run(asyncio.wait_for(main(), HANG_S))


@pytest.mark.parametrize("group_size", [None, 2])
def test_dropping_cancels_a_rollout_that_no_step_may_train_on(tmp_path, group_size):
    """And its prompt leaves: it would hold a place of the bound again, and in the end all."""
    asked, cancelled = [], []

    async def generate(prompt, *, version, draft, sample=None):
        asked.append((prompt, version))
        try:
            if prompt % 3 == 0:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            cancelled.append(prompt)
            raise
        rollout = make_rollout(versions=(version, version))
        return [rollout] if sample is None else rollout

    async def body(journal):
        world = World()
        world.generate = generate
        async with make_loop(
            world, ledger=journal, group_size=group_size, max_in_flight=9, source=str
        ) as loop:
            return [step async for step in loop.steps(12)], loop.sources

    with Journal(tmp_path / "journal") as journal:
        steps, sources = asyncio.run(body(journal))
        left = journal.counts()["failed"]
    samples = group_size or 1
    lost = [prompt for step in steps for prompt, _ in step.lost]
    assert len(steps) == 12
    assert lost == [*range(0, 3 * len(lost), 3)]
    assert len(lost) == left == sum(step.dropped for step in steps) > 8
    assert {reason for step in steps for _, reason in step.lost} == {
        "failed: dropped, because its rollouts took too many steps"
    }
    assert cancelled[: samples * left] == [prompt for prompt in lost for _ in range(samples)]
    assert [prompt for prompt, _ in asked] == [i // samples for i in range(len(asked))]
    assert sources["0"] == {"dropped": 1, "failed": 1}


def test_dropping_asks_again_if_only_the_samples_of_an_earlier_run_are_too_old(tmp_path):
    asked, fields = [], make_rollout(versions=(0, 0))
    names = ("tokens", "prompt_length", "logprobs", "versions")
    old = Partial(**{name: getattr(fields, name) for name in names})

    async def generate(prompt, *, version, draft):
        asked.append((prompt, dict(draft.partials)))
        if draft.partials:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return [make_rollout(versions=(version, version))]

    async def body(journal):
        world = World()
        world.generate = generate
        async with make_loop(
            world, ledger=journal, version=7, prompts=range(4), batch_size=4
        ) as loop:
            return [step async for step in loop.steps(1)]

    with Journal(tmp_path / "journal") as journal:
        journal.drawn(0, 0)
        journal.started(0, 0)
        journal.sampled(0, 0, old)
        (step,) = asyncio.run(body(journal))
    assert (step.dropped, step.lost) == (1, ())
    assert sorted(group.prompt for group in step.groups) == [0, 1, 2, 3]
    assert [partials for prompt, partials in asked if prompt == 0][-1:] == [{}]


def test_dropping_lets_prompts_leave_that_end_too_late_while_the_trainer_trains():
    asked = []

    async def generate(prompt, *, version):
        asked.append(prompt)
        await asyncio.sleep(29.5 if prompt % 8 == 0 else 1.0)
        return [make_rollout(versions=(version, version))]

    async def train(groups, *, version):
        await asyncio.sleep(10.0)

    async def publish(version):
        pass

    async def body():
        clock = VirtualClock()
        policy = StalenessPolicy(2, on_stale="drop", correction="a test")
        loop = AsyncLoop(
            prompts=itertools.count(), generate=generate, train=train, publish=publish,
            buffer=RolloutBuffer(capacity=24, staleness=policy, clock=clock),
            batch_size=8, max_in_flight=24, clock=clock,
        )  # fmt: skip
        async with loop:
            return [step async for step in loop.steps(40)], clock.now()

    steps, took_s = run_in_virtual_time(body())
    dropped = sum(step.dropped for step in steps)
    assert dropped == sum(len(step.lost) for step in steps) > 20
    assert asked == [*range(len(asked))]
    assert took_s < 440  # 40 steps of 10 s, and what the first batch takes.
