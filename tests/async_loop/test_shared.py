"""The buffer of several processes: beside the one of a single process, and at its limits."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primeblocks.async_loop import Group, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.plan.virtual import VirtualClock, run_in_virtual_time
from primeblocks.async_loop.shared import SharedRolloutBuffer
from primeblocks.errors import (
    CapacityError,
    ClosedError,
    DeadlineError,
    UsageError,
)
from tests.deadlines import HANG_S

from .conftest import make_group, make_rollout
from .shared_site import Child, name, plain

__all__ = ["name"]  # A fixture.
POLICY = StalenessPolicy(0, "drop", "a test")
ROOM = {"capacity": 4, "capacity_bytes": 64 << 10, "staleness": POLICY}
pytestmark = pytest.mark.stress
each_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def take(buffer, count, *, version=0, **more):
    return buffer.take(count, version=version, timeout_s=0, **more)


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2)),  # How old it is.
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("advance"), st.integers(1, 2)),
    ),
    max_size=30,
)


@each_example
@given(COMMANDS, st.sampled_from(["pace", "wait", "mask", "drop", "continue"]))
def test_it_does_what_the_buffer_of_one_process_does(name, commands, on_stale):
    policy = StalenessPolicy(1, on_stale, "a test")

    def outcome(call):
        dropped = []
        try:
            return plain(call(dropped.append)), dropped
        except DeadlineError:
            return "nothing", dropped

    def run(make, put, take, ordinal):
        seen, made, version = [], 0, 2
        with asyncio.Runner() as runner:
            buffer = make()
            for command, number in commands:
                if command == "advance":
                    version += number
                elif command == "put" and len(buffer) < 4:
                    group = make_group(made, version=version - number)
                    put(runner, buffer, replace(group, ordinal=made))
                    made += 1
                elif command == "take":
                    call = partial(take, runner, buffer, number, version)
                    found, dropped = outcome(call)
                    seen.append((found, sorted(map(ordinal, dropped)), len(buffer)))
        return seen

    alone = run(
        lambda: RolloutBuffer(capacity=4, staleness=policy),
        lambda runner, buffer, group: runner.run(buffer.put(group, timeout_s=0)),
        lambda runner, buffer, count, version, on_drop: runner.run(
            buffer.take(count, version=version, timeout_s=0, on_drop=on_drop)
        ),
        lambda group: group.ordinal,
    )
    with SharedRolloutBuffer.create(name, **ROOM | {"staleness": policy}) as shared:
        assert alone == run(
            lambda: shared,
            lambda runner, buffer, group: buffer.put(group, timeout_s=0),
            lambda runner, buffer, count, version, on_drop: take(
                buffer, count, version=version, on_drop=on_drop
            ),
            int,
        )


@each_example
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 3)), min_size=1, max_size=12))
def test_groups_come_back_bit_for_bit_from_whatever_cells_are_free(name, sizes):
    """Groups of random sizes are taken in another order than they came, which scatters cells."""
    draw = np.random.default_rng(0)
    with SharedRolloutBuffer.create(
        name, **ROOM | {"capacity": 12, "capacity_bytes": 96 << 10}
    ) as buffer:
        held = []
        for number, (size, left) in enumerate(sizes):
            routes = draw.integers(0, 256, size, np.uint8)
            attachments = {
                "routes": routes.tobytes(),
                "values": draw.normal(size=(3, 1 + size // 100)).T,
                "strided": routes[::2],
                "deep": {"of": [None, True, -1, 0.5, "é", (1, "a")], "constant": constant(routes)},
            }
            rollout = make_rollout(attachments=attachments, prompt_id=("p", number))
            group = Group({"q": [number]}, (rollout,), number % 3, 0.25, number)
            group = replace(group, version=0)
            buffer.put(group, timeout_s=0)
            held.append(group)
            while len(held) > left:
                (taken,) = take(buffer, 1)
                assert plain(taken) == plain(held.pop(0))
        assert buffer.held_bytes <= 96 << 10


def constant(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def test_thousands_of_groups_of_several_processes_are_taken_once_each(name):
    producers, groups, bound = 3, 400, 24 << 10
    with SharedRolloutBuffer.create(
        name, capacity=12, capacity_bytes=bound, staleness=POLICY
    ) as buffer:

        def body(say, producer):
            attached = SharedRolloutBuffer.attach(name)
            for number in range(groups):
                size = (number * 37 + producer) % 2000
                attached.put(
                    Group(
                        [producer, number],
                        (make_rollout(attachments={"x": bytes([number % 256]) * size}),),
                        0,
                    ),
                    timeout_s=HANG_S,
                )

        children = [Child(lambda say, p=producer: body(say, p)) for producer in range(producers)]
        taken = []
        while len(taken) < producers * groups:
            count = min(1 + len(taken) % 3, producers * groups - len(taken))
            for group in buffer.take(count, version=0, timeout_s=HANG_S):
                producer, number = group.prompt
                size = (number * 37 + producer) % 2000
                assert group.rollouts[0].attachments["x"] == bytes([number % 256]) * size
                taken.append((producer, number))
            assert buffer.held_bytes <= bound
            assert len(buffer) <= 12
        assert [child.wait() for child in children] == [(0, [])] * producers
        for producer in range(producers):  # And in the order in which each process put them.
            assert [n for p, n in taken if p == producer] == [*range(groups)]
        assert (len(buffer), buffer.held_bytes) == (0, 0)


def in_virtual_time(test):
    """Run a coroutine function whose waits take no time, on a buffer of two groups."""

    def run(name):
        async def body():
            clock = VirtualClock()
            with SharedRolloutBuffer.create(
                name, capacity=3, capacity_bytes=8 << 10, staleness=POLICY, clock=clock
            ) as buffer:
                await test(buffer)

        run_in_virtual_time(body())

    return run


def of_size(prompt, size):
    return Group(prompt, (make_rollout(attachments={"x": bytes(size)}),), 0)


@in_virtual_time
async def test_who_waits_gets_room_in_the_order_of_coming(buffer):
    """A large group is not overtaken by small ones that would fit."""
    for prompt in "ab":
        await buffer.put_async(of_size(prompt, 3 << 10), timeout_s=HANG_S)
    large = asyncio.create_task(buffer.put_async(of_size("large", 6 << 10), timeout_s=HANG_S))
    await asyncio.sleep(1)
    small = asyncio.create_task(buffer.put_async(of_size("small", 10), timeout_s=HANG_S))
    await asyncio.sleep(10)
    assert not large.done()
    assert not small.done()
    assert [g.prompt for g in await buffer.take_async(1, version=0, timeout_s=HANG_S)] == ["a"]
    late = asyncio.create_task(buffer.put_async(of_size("late", 10), timeout_s=HANG_S))
    await asyncio.sleep(10)
    assert not small.done()
    assert not late.done()
    taken = [g.prompt for g in await buffer.take_async(1, version=0, timeout_s=HANG_S)]
    await large
    taken += [g.prompt for g in await buffer.take_async(1, version=0, timeout_s=HANG_S)]
    await asyncio.gather(small, late)
    taken += [g.prompt for g in await buffer.take_async(2, version=0, timeout_s=HANG_S)]
    assert taken == ["b", "large", "small", "late"]


@in_virtual_time
async def test_who_waits_hears_of_a_change_within_milliseconds(buffer):
    clock = asyncio.get_running_loop().time
    taking = asyncio.create_task(buffer.take_async(1, version=0, timeout_s=HANG_S))
    await asyncio.sleep(10.03)
    putting = clock()
    await buffer.put_async(of_size("a", 7 << 10), timeout_s=HANG_S)
    await taking
    assert clock() - putting < 0.01
    await buffer.put_async(of_size("b", 7 << 10), timeout_s=HANG_S)
    waiting = asyncio.create_task(buffer.put_async(of_size("c", 7 << 10), timeout_s=HANG_S))
    await asyncio.sleep(10.03)
    began = clock()
    await buffer.take_async(1, version=0, timeout_s=HANG_S)
    await waiting
    assert clock() - began < 0.01


@in_virtual_time
async def test_waits_end_at_their_deadline_and_lose_nothing(buffer):
    loop = asyncio.get_running_loop()
    with pytest.raises(DeadlineError, match="1 groups"):
        await buffer.take_async(1, version=0, timeout_s=HANG_S)
    assert loop.time() == pytest.approx(5)
    await buffer.put_async(of_size("a", 5 << 10), timeout_s=HANG_S)
    with pytest.raises(DeadlineError, match="room"):
        await buffer.put_async(of_size("b", 3 << 10), timeout_s=HANG_S)
    assert loop.time() == pytest.approx(10)
    await buffer.put_async(of_size("c", 10), timeout_s=HANG_S)
    with pytest.raises(DeadlineError, match="3 groups"):
        await buffer.take_async(3, version=0, timeout_s=HANG_S)
    taken = await buffer.take_async(2, version=0, timeout_s=HANG_S)
    assert [group.prompt for group in taken] == ["a", "c"]


@in_virtual_time
async def test_who_is_cancelled_has_neither_put_nor_taken(buffer):
    await buffer.put_async(of_size("a", 7 << 10), timeout_s=HANG_S)
    putting = asyncio.create_task(buffer.put_async(of_size("b", 3 << 10), timeout_s=HANG_S))
    await asyncio.sleep(1)
    with pytest.raises(UsageError, match="running"):
        buffer.close()
    putting.cancel()
    taking = asyncio.create_task(buffer.take_async(2, version=0, timeout_s=HANG_S))
    await asyncio.sleep(1)
    with pytest.raises(DeadlineError, match="took groups all the time"):
        await buffer.take_async(1, version=0, timeout_s=HANG_S)
    taking.cancel()
    await asyncio.wait([putting, taking])
    assert putting.cancelled()
    assert taking.cancelled()
    taken = await buffer.take_async(1, version=0, timeout_s=HANG_S)
    assert [group.prompt for group in taken] == ["a"]
    with pytest.raises(DeadlineError):
        await buffer.take_async(1, version=0, timeout_s=HANG_S)
    assert buffer.held_bytes == 0


@in_virtual_time
async def test_a_batch_that_never_fits_is_refused_at_once(buffer):
    for prompt in "ab":
        await buffer.put_async(of_size(prompt, 3 << 10), timeout_s=HANG_S)
    putting = asyncio.create_task(buffer.put_async(of_size("c", 3 << 10), timeout_s=HANG_S))
    await asyncio.sleep(1)
    with pytest.raises(CapacityError, match=r"batch of 3 groups.*2 groups of 3 and 8,192 bytes"):
        await buffer.take_async(3, version=0, timeout_s=HANG_S)
    assert asyncio.get_running_loop().time() < 10
    await buffer.take_async(2, version=0, timeout_s=HANG_S)
    await putting


@in_virtual_time
async def test_unlinking_ends_the_waits_of_others(buffer):
    taking = asyncio.create_task(buffer.take_async(1, version=0, timeout_s=HANG_S))
    await asyncio.sleep(1)
    buffer.unlink()
    with pytest.raises(ClosedError, match="unlinked"):
        await taking
    with pytest.raises(ClosedError, match="unlinked"):
        await buffer.put_async(of_size("a", 1), timeout_s=HANG_S)
