"""Errors of prompts, rollouts and steps: what ends, what is tried again, what is told."""

import asyncio
import threading
import time

import pytest

from primeblocks.async_loop import AsyncLoop, Journal, Partial, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.scheduler import Retries
from primeblocks.errors import EngineError, UsageError
from primeblocks.planning.virtual import VirtualClock, run_in_virtual_time
from tests.deadlines import HANG_S

from .conftest import make_rollout
from .test_loop import World, collect, make_loop, run


def test_an_error_of_generate_keeps_its_traceback_and_is_logged_once_a_kind(caplog):
    async def body(world, loop):
        async def a_function_with_a_bug(prompt, *, version):
            if prompt % 2:
                raise EngineError("gone")
            return prompt.rollouts

        world.generate = a_function_with_a_bug
        with pytest.raises((AttributeError, EngineError)) as caught:
            await collect(world, loop)
        return [frame.name for frame in caught.traceback]

    _, names = run(body, retries=Retries(attempts=3, backoff_s=0.0, give_up_after=8))
    assert "a_function_with_a_bug" in names
    logged = [record for record in caplog.records if "generate failed" in record.message]
    kinds = [record.exc_info[0] for record in logged]
    assert sorted(kinds, key=str) == [AttributeError, EngineError]
    for record in logged:
        assert "a_function_with_a_bug" in caplog.handler.format(record)


@pytest.mark.parametrize(
    ("mistake", "attempts"),
    [
        (TypeError("x"), 1), (NameError("x"), 1), (UnboundLocalError("x"), 1),
        (AttributeError("x"), 1), (ImportError("x"), 1), (NotImplementedError("x"), 1),
        (EngineError("x"), 3), (OSError("x"), 3),
    ],
)  # fmt: skip
def test_mistakes_in_code_are_not_tried_again(mistake, attempts):
    async def body(world, loop):
        world.fail["generate"] = mistake
        with pytest.raises(type(mistake)) as caught:
            await collect(world, loop)
        assert "0 of 5 steps were trained" in caught.value.__notes__[0]
        return loop

    world, loop = run(
        body, prompts=range(2), retries=Retries(attempts=3, backoff_s=0.0, give_up_after=9)
    )
    assert sorted(prompt for prompt, _ in world.asked) == sorted([0, 1] * attempts)
    assert [prompt for prompt, _ in loop.lost] == [0, 1]
    assert all(type(mistake).__name__ in reason for _, reason in loop.lost)


async def _no_rollouts():
    return []


async def _cancels_a_task_of_its_own():
    waiting = asyncio.get_running_loop().create_future()
    waiting.cancel()
    await waiting


@pytest.mark.parametrize("timeout_s", [None, HANG_S])
@pytest.mark.parametrize(
    ("fails", "reason"),
    [(_no_rollouts, "has no rollouts"), (_cancels_a_task_of_its_own, "cancelled by its own code")],
)
def test_an_answer_that_does_not_come_is_tried_again(fails, reason, timeout_s):
    async def body(world, loop):
        generate, failed = world.generate, []

        async def fails_at_first(prompt, *, version):
            if failed.count(prompt) < (3 if prompt == 1 else 1):
                failed.append(prompt)
                return await fails()
            return await generate(prompt, version=version)

        world.generate = fails_at_first
        return await collect(world, loop)

    retries = Retries(attempts=3, backoff_s=0.0, give_up_after=9)
    _, steps = run(body, prompts=range(5), retries=retries, rollout_timeout_s=timeout_s)
    assert len(steps) == 2
    ((prompt, why),) = [each for step in steps for each in step.lost]
    assert prompt == 1
    assert reason in why


def test_fewer_steps_than_were_asked_for_have_a_reason():
    """Prompts 0 to 3 make two steps, 4 fails, 5 is left."""

    async def body(world, loop):
        generate = world.generate

        async def fails(prompt, *, version):
            if prompt == 4:
                raise EngineError("gone")
            return await generate(prompt, version=version)

        world.generate = fails
        assert loop.ended is None
        assert len(await collect(world, loop)) == 2
        return loop

    options = {"max_in_flight": 1, "retries": Retries(attempts=1, give_up_after=9)}
    _, loop = run(body, prompts=range(6), bound=0, **options)
    assert loop.ended == (
        "2 of 5 steps were trained, because the prompts are used up: 4 were trained on, 1 failed, "
        "0 were filtered, and 1 are left. A batch needs 2."
    )
    ((prompt, reason),) = loop.lost
    assert (prompt, reason) == (4, "failed: EngineError('gone')")


def test_a_prompt_that_was_given_up_asks_for_no_more_samples():
    async def body(world, loop):
        asked = []

        async def generate(prompt, *, version, sample):
            asked.append((prompt, sample))
            if prompt == 0:
                raise EngineError("gone")
            return make_rollout(versions=(version, version))

        world.generate = generate
        await collect(world, loop, count=1)
        return asked

    _, asked = run(
        body, group_size=3, max_in_flight=1, batch_size=1, prompts=range(2), bound=0,
        retries=Retries(attempts=1, give_up_after=9),
    )  # fmt: skip
    assert asked == [(0, 0), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_sample_that_fails_after_its_prompt_was_given_up_changes_nothing(attempts):
    async def body(world, loop):
        asked = []

        async def generate(prompt, *, version, sample):
            asked.append((prompt, sample))
            if prompt == 0 and sample == 0:
                await asyncio.sleep(0)
                raise TypeError("a mistake")
            if prompt == 0:
                try:
                    await asyncio.sleep(HANG_S)
                finally:
                    raise EngineError("the engine does not take the abort either")
            return make_rollout(versions=(version, version))

        world.generate = generate
        (step,) = await collect(world, loop, count=1)
        return asked, step.lost

    _, (asked, lost) = run(
        body, group_size=2, max_in_flight=2, batch_size=1, prompts=range(2), bound=0,
        retries=Retries(attempts=attempts, backoff_s=0, give_up_after=9),
    )  # fmt: skip
    assert asked == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(lost) == [(0, "failed: TypeError('a mistake')")]


def test_prompts_that_fail_at_once_end_the_first_step_and_leave_no_request():
    """An iterable that could go on after its error."""

    class Prompts:
        count = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.count += 1
            if self.count == 3:
                raise OSError("a bad line")
            return self.count

    async def body(world, loop):
        tasks = asyncio.all_tasks()
        with pytest.raises(OSError, match="a bad line"):
            await collect(world, loop)
        asked = len(world.asked)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(world.asked) == asked
        assert asyncio.all_tasks() == tasks

    run(body, prompts=Prompts())


@pytest.mark.parametrize("name", ["train", "publish"])
def test_the_end_of_an_iterator_in_a_blocking_call_is_told_at_once(name):
    async def body(world, loop):
        with pytest.raises(RuntimeError, match=r"raised StopIteration\(\).*Catch this") as caught:
            await collect(world, loop)
        assert isinstance(caught.value.__cause__, StopIteration)

    def call(*_, **named):
        return next(iter(()))

    async def main():
        world = World()
        setattr(world, name, call)
        await body(world, make_loop(world, step_timeout_s=HANG_S))

    asyncio.run(asyncio.wait_for(main(), HANG_S / 2))


@pytest.mark.parametrize("fails_in", ["generate", "publish"])
def test_no_train_runs_or_starts_once_a_loop_has_failed(fails_in):
    """`generate` fails while `train` runs; a publish fails between two steps."""
    begun, ended, release = [], [], threading.Event()

    async def generate(prompt, *, version):
        if fails_in == "generate" and prompt:
            while not begun:
                await asyncio.sleep(0.001)
            asyncio.get_running_loop().call_later(0.05, release.set)
            return "no group"
        return [make_rollout(versions=[version])]

    def train(groups, *, version):
        begun.append(version)
        if fails_in == "generate":
            assert release.wait(HANG_S)
            time.sleep(0.05)
        ended.append(version)

    def publish(version):
        async def send():
            raise EngineError("gone")

        return send()

    policy = StalenessPolicy(3, correction="none: a test")

    async def body():
        loop = AsyncLoop(
            prompts=range(9), generate=generate, train=train, publish=publish, batch_size=1,
            max_in_flight=2, buffer=RolloutBuffer(capacity=8, staleness=policy),
        )  # fmt: skip

        async def train_all():
            async with loop:
                async for _ in loop.steps(5):
                    await asyncio.sleep(0.05)  # The next batch is ready, and the publish failed.

        with pytest.raises((UsageError, EngineError)):
            await train_all()
        assert begun == ended == [0]

    asyncio.run(asyncio.wait_for(body(), HANG_S))


class _Engine:
    """An engine that can die: each rollout has three tokens, which are saved one by one."""

    def __init__(self):
        self.is_dead, self.went_on = False, set()

    async def generate(self, prompt, *, version, sample, draft):
        so_far = draft.partials.get(sample)
        if so_far is not None:
            self.went_on.add((prompt, sample))
        versions = [] if so_far is None else so_far.versions.tolist()
        while True:
            await asyncio.sleep(1.0)
            if self.is_dead or prompt == 3:
                raise EngineError("the engine's process was killed")
            versions.append(version)
            fields = make_rollout(versions=versions)
            if len(versions) == 3:
                return fields
            names = ("tokens", "prompt_length", "logprobs", "versions")
            draft.save(sample, Partial(**{name: getattr(fields, name) for name in names}))


async def _nothing(*_, **__):
    pass


def _life(engine, journal, *, steps, version=0, publish=_nothing, trained=None):
    """One life of a run. Returns the loop and the error that ended it, or None."""
    clock = VirtualClock()
    policy = StalenessPolicy(2, correction="a test")

    async def train(groups, *, version):
        if trained is not None:
            trained.append((version, [group.ordinal for group in groups]))

    async def body():
        loop = AsyncLoop(
            prompts=range(100), generate=engine.generate, train=train, publish=publish,
            buffer=RolloutBuffer(capacity=60, staleness=policy, clock=clock),
            batch_size=16, max_in_flight=96, group_size=2, ledger=journal, version=version,
            clock=clock,
        )  # fmt: skip
        error = None
        try:
            async with loop:
                async for _ in loop.steps(steps):
                    pass
        except EngineError as raised:
            error = raised
        return loop, error

    return run_in_virtual_time(body())


def test_prompts_that_fail_with_a_dead_engine_are_continued_by_the_next_run(tmp_path):
    engine = _Engine()

    async def dies_while_rollouts_are_in_flight(version):
        await asyncio.sleep(1.5)
        engine.is_dead = version == 3

    with Journal(tmp_path / "journal") as journal:
        loop, error = _life(engine, journal, steps=9, publish=dies_while_rollouts_are_in_flight)
        assert error is not None
        counts = journal.counts()
        # Prompt 3 fails by itself, as the groups that finish after it show.
        assert counts["failed"] == 1
        assert counts["in flight"] > 16
        engine.is_dead, engine.went_on = False, set()
        _, error = _life(engine, journal, steps=3, version=loop.version)
        assert error is None
        assert len(engine.went_on) > 16
        assert journal.counts()["failed"] == 1


def test_after_a_failed_publish_the_next_loop_does_not_train_on_the_batch_again(tmp_path):
    engine, trained = _Engine(), []

    async def fails(version):
        raise EngineError("no engine")

    with Journal(tmp_path / "journal") as journal:
        loop, error = _life(engine, journal, steps=2, publish=fails, trained=trained)
        assert error is not None
        assert (loop.version, loop.published) == (1, 0)
        _life(engine, journal, steps=2, version=loop.version, trained=trained)
    assert [version for version, _ in trained] == [0, 1, 2]
    ordinals = [ordinal for _, batch in trained for ordinal in batch]
    assert len({*ordinals}) == len(ordinals) == 48


def test_an_empty_journal_of_a_run_that_goes_on_is_told(tmp_path, caplog):
    with Journal(tmp_path / "first") as journal:
        journal.restore(0)
    assert not caplog.records
    with Journal(tmp_path / "second") as journal:
        journal.restore(1000)
    assert "has no prompts, and the run begins at policy 1000" in caplog.text
