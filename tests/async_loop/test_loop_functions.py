"""The loop and the functions that it is given: what it refuses, keeps, logs and says at its end."""

import asyncio
import functools
import itertools
import re
import threading

import pytest

from primeblocks.async_loop import AsyncLoop, Group, Journal, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.scheduler import Retries
from primeblocks.errors import DeadlineError, EngineError, UsageError
from primeblocks.planning.virtual import run_in_virtual_time
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
        with pytest.raises(OSError, match="a bad line"):
            await collect(world, loop)
        asked = len(world.asked)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(world.asked) == asked
        assert len(asyncio.all_tasks()) == 2  # This one, and that which waits for it.

    run(body, prompts=Prompts())


@pytest.mark.parametrize("name", ["train", "publish"])
def test_the_end_of_an_iterator_in_a_blocking_call_is_told_at_once(name):
    async def body(world, loop):
        with pytest.raises(RuntimeError, match=r"raised StopIteration\(\).*Catch it") as caught:
            await collect(world, loop)
        assert isinstance(caught.value.__cause__, StopIteration)

    def call(*_, **named):
        return next(iter(()))

    async def main():
        world = World()
        setattr(world, name, call)
        await body(world, make_loop(world, step_timeout_s=HANG_S))

    asyncio.run(asyncio.wait_for(main(), HANG_S / 2))


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
