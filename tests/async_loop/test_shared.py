"""The buffer of several processes: beside the one of a single process, and at its limits."""

import asyncio
import gc
import os
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primeblocks.async_loop import AsyncLoop, Group, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.shared import SharedRolloutBuffer, arena, file
from primeblocks.async_loop.shared import buffer as shared_buffer
from primeblocks.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    UnsupportedError,
    UsageError,
)

from . import virtual_time
from .conftest import make_group, make_rollout
from .shared_site import SHM, Child, name, plain

__all__ = ["name"]  # A fixture.
POLICY = StalenessPolicy(0, "drop", "a test")
ROOM = {"capacity": 4, "capacity_bytes": 64 << 10, "staleness": POLICY}
pytestmark = pytest.mark.stress
each_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def buffer(name):
    with SharedRolloutBuffer.create(name, **ROOM) as buffer:
        yield buffer


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
                    timeout_s=60,
                )

        children = [Child(lambda say, p=producer: body(say, p)) for producer in range(producers)]
        taken = []
        while len(taken) < producers * groups:
            count = min(1 + len(taken) % 3, producers * groups - len(taken))
            for group in buffer.take(count, version=0, timeout_s=60):
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
            clock = virtual_time.VirtualClock()
            with SharedRolloutBuffer.create(
                name, capacity=3, capacity_bytes=8 << 10, staleness=POLICY, clock=clock
            ) as buffer:
                await test(buffer)

        virtual_time.run(body())

    return run


def of_size(prompt, size):
    return Group(prompt, (make_rollout(attachments={"x": bytes(size)}),), 0)


@in_virtual_time
async def test_who_waits_gets_room_in_the_order_of_coming(buffer):
    """A large group is not overtaken by small ones that would fit."""
    for prompt in "ab":
        await buffer.put_async(of_size(prompt, 3 << 10), timeout_s=1)
    large = asyncio.create_task(buffer.put_async(of_size("large", 6 << 10), timeout_s=100))
    await asyncio.sleep(1)
    small = asyncio.create_task(buffer.put_async(of_size("small", 10), timeout_s=100))
    await asyncio.sleep(10)
    assert not large.done()
    assert not small.done()
    assert [g.prompt for g in await buffer.take_async(1, version=0, timeout_s=1)] == ["a"]
    late = asyncio.create_task(buffer.put_async(of_size("late", 10), timeout_s=100))
    await asyncio.sleep(10)
    assert not small.done()
    assert not late.done()
    taken = [g.prompt for g in await buffer.take_async(1, version=0, timeout_s=1)]
    await large
    taken += [g.prompt for g in await buffer.take_async(1, version=0, timeout_s=1)]
    await asyncio.gather(small, late)
    taken += [g.prompt for g in await buffer.take_async(2, version=0, timeout_s=1)]
    assert taken == ["b", "large", "small", "late"]


@in_virtual_time
async def test_who_waits_hears_of_a_change_within_milliseconds(buffer):
    clock = asyncio.get_running_loop().time
    taking = asyncio.create_task(buffer.take_async(1, version=0, timeout_s=100))
    await asyncio.sleep(10.03)
    putting = clock()
    await buffer.put_async(of_size("a", 7 << 10), timeout_s=1)
    await taking
    assert clock() - putting < 0.01
    await buffer.put_async(of_size("b", 7 << 10), timeout_s=1)
    waiting = asyncio.create_task(buffer.put_async(of_size("c", 7 << 10), timeout_s=100))
    await asyncio.sleep(10.03)
    began = clock()
    await buffer.take_async(1, version=0, timeout_s=1)
    await waiting
    assert clock() - began < 0.01


@in_virtual_time
async def test_waits_end_at_their_deadline_and_lose_nothing(buffer):
    loop = asyncio.get_running_loop()
    with pytest.raises(DeadlineError, match="1 groups"):
        await buffer.take_async(1, version=0, timeout_s=5)
    assert loop.time() == pytest.approx(5)
    await buffer.put_async(of_size("a", 5 << 10), timeout_s=1)
    with pytest.raises(DeadlineError, match="room"):
        await buffer.put_async(of_size("b", 3 << 10), timeout_s=5)
    assert loop.time() == pytest.approx(10)
    await buffer.put_async(of_size("c", 10), timeout_s=1)
    with pytest.raises(DeadlineError, match="3 groups"):
        await buffer.take_async(3, version=0, timeout_s=5)
    taken = await buffer.take_async(2, version=0, timeout_s=1)
    assert [group.prompt for group in taken] == ["a", "c"]


@in_virtual_time
async def test_who_is_cancelled_has_neither_put_nor_taken(buffer):
    await buffer.put_async(of_size("a", 7 << 10), timeout_s=1)
    putting = asyncio.create_task(buffer.put_async(of_size("b", 3 << 10), timeout_s=100))
    await asyncio.sleep(1)
    with pytest.raises(UsageError, match="running"):
        buffer.close()
    putting.cancel()
    taking = asyncio.create_task(buffer.take_async(2, version=0, timeout_s=100))
    await asyncio.sleep(1)
    with pytest.raises(DeadlineError, match="took groups all the time"):
        await buffer.take_async(1, version=0, timeout_s=1)
    taking.cancel()
    await asyncio.wait([putting, taking])
    assert putting.cancelled()
    assert taking.cancelled()
    taken = await buffer.take_async(1, version=0, timeout_s=1)
    assert [group.prompt for group in taken] == ["a"]
    with pytest.raises(DeadlineError):
        await buffer.take_async(1, version=0, timeout_s=1)
    assert buffer.held_bytes == 0


@in_virtual_time
async def test_a_batch_that_never_fits_is_refused_at_once(buffer):
    for prompt in "ab":
        await buffer.put_async(of_size(prompt, 3 << 10), timeout_s=1)
    putting = asyncio.create_task(buffer.put_async(of_size("c", 3 << 10), timeout_s=100))
    await asyncio.sleep(1)
    with pytest.raises(CapacityError, match=r"batch of 3 groups.*2 groups of 3 and 8,192 bytes"):
        await buffer.take_async(3, version=0, timeout_s=100)
    assert asyncio.get_running_loop().time() < 10
    await buffer.take_async(2, version=0, timeout_s=1)
    await putting


@in_virtual_time
async def test_unlinking_ends_the_waits_of_others(buffer):
    taking = asyncio.create_task(buffer.take_async(1, version=0, timeout_s=100))
    await asyncio.sleep(1)
    buffer.unlink()
    with pytest.raises(ClosedError, match="unlinked"):
        await taking
    with pytest.raises(ClosedError, match="unlinked"):
        await buffer.put_async(of_size("a", 1), timeout_s=1)


def test_sizes_and_names_that_cannot_be_are_refused(name, buffer):
    for change, error, said in (
        ({"capacity": 0}, UsageError, "1 group.*got 0"),
        ({"capacity_bytes": 1023}, UsageError, "1,024 bytes.*1,023"),
        ({"capacity_bytes": 1 << 50}, CapacityError, "/dev/shm has"),
    ):
        with pytest.raises(error, match=said):
            SharedRolloutBuffer.create(f"{name}-2", **ROOM | change)
    for wrong in ("", "../x", "a/b", "ü"):
        with pytest.raises(UsageError, match="a name is made of"):
            SharedRolloutBuffer.create(wrong, **ROOM)
    with pytest.raises(UsageError, match="Create it first"):
        SharedRolloutBuffer.attach(f"{name}-2")
    with pytest.raises(UsageError, match="cannot take 5 groups"):
        take(buffer, 5)
    with pytest.raises(CapacityError, match=r"66,\d\d\d bytes.*Raise capacity_bytes"):
        buffer.put(of_size("a", 65 << 10), timeout_s=0)
    with pytest.raises(UnsupportedError, match=r"ordinal 0\['prompt'\] is a set"):
        buffer.put(make_group({1}), timeout_s=0)
    assert buffer.held_bytes == 0
    assert not (SHM / f"primeblocks-{name}-2").exists()


def test_only_this_user_may_open_it_and_only_with_the_same_fields(name, monkeypatch, tmp_path):
    path = SHM / f"primeblocks-{name}"
    SharedRolloutBuffer.create(name, **ROOM).close()
    assert path.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        for call in (SharedRolloutBuffer.attach, lambda it: SharedRolloutBuffer.create(it, **ROOM)):
            with pytest.raises(UsageError, match="belongs to user"):
                call(name)
    with monkeypatch.context() as newer:
        newer.setattr(shared_buffer, "_FIELDS", [["prompt"], ["tokens"]])
        with pytest.raises(UnsupportedError, match="same version"):
            SharedRolloutBuffer.attach(name)
    with monkeypatch.context() as without:
        without.setattr(file, "_FOLDER", tmp_path / "shm")
        with pytest.raises(UnsupportedError, match="no file can be made in"):
            SharedRolloutBuffer.create(name, **ROOM)
    SharedRolloutBuffer.attach(name).close()  # All as it was.


def test_a_loop_that_records_what_it_starts_refuses_groups_of_others(buffer):
    with pytest.raises(UsageError, match=r"RolloutBuffer of its own; got a SharedRolloutBuffer"):
        AsyncLoop(
            prompts=(), generate=None, train=None, publish=None, buffer=buffer,
            batch_size=1, max_in_flight=1,
        )  # fmt: skip


def test_a_process_opens_a_buffer_once_and_a_fork_for_itself(name, buffer):
    for again in (
        SharedRolloutBuffer.attach,
        lambda name: SharedRolloutBuffer.create(name, **ROOM),
    ):
        with pytest.raises(UsageError, match="open already"):
            again(name)

    def body(say):
        with pytest.raises(UsageError, match="fork"):
            buffer.put(make_group("a"), timeout_s=0)
        attached = SharedRolloutBuffer.attach(name)
        buffer.close()  # Does not end the locks of the other.
        gc.collect()
        say(os.getpid())
        attached.put(make_group("a"), timeout_s=0)
        signal.pause()

    child = Child(body)
    taken = buffer.take(1, version=0, timeout_s=60)
    assert [group.prompt for group in taken] == ["a"]
    buffer.close()
    with pytest.raises(ClosedError, match="closed in this process"):
        take(buffer, 1)
    with pytest.raises(UsageError, match="has it open"):  # The child has.
        SharedRolloutBuffer.create(name, **ROOM)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    SharedRolloutBuffer.create(name, **ROOM).close()


@each_example
@given(st.data())
def test_every_changed_byte_of_a_group_is_found(name, data):
    with SharedRolloutBuffer.create(name, **ROOM) as buffer:
        path = SHM / f"primeblocks-{name}"
        empty = read(path)
        buffer.put(make_group("first"), timeout_s=0)
        before = read(path)
        entry = before.index(b'{"dict"') // 1024 * 1024  # Cells are aligned to their size.
        size = before.index(b"\0" * 1024, entry) - entry
        assert empty[entry : entry + size] == bytes(size)
        at = entry + data.draw(st.integers(0, size - 1))
        flip(path, at, data.draw(st.integers(1, 255)))
        buffer.put(make_group("second"), timeout_s=0)
        with pytest.raises(CorruptionError, match=r"ordinal was 0.*ask its prompt again"):
            take(buffer, 1)
        assert [group.prompt for group in take(buffer, 1)] == ["second"]
        assert buffer.held_bytes == 0


@pytest.mark.parametrize("word", ["SIZE", "HEADER_SIZE", "OLDEST_VERSION", "DIGEST"])
@pytest.mark.parametrize("by", [1, 64, 255])
def test_a_changed_word_of_a_group_is_found(name, buffer, word, by):
    buffer.put(make_group("first"), timeout_s=0)
    first = file.HEADER_BYTES + 8 * arena.WORDS
    flip(SHM / f"primeblocks-{name}", first + 8 * arena.Word[word], by)
    with pytest.raises(CorruptionError, match="checksum"):
        take(buffer, 1, version=0)
    assert (len(buffer), buffer.held_bytes) == (0, 0)


def test_a_file_that_was_damaged_is_refused(name):
    path = SHM / f"primeblocks-{name}"
    for damage, said in (
        (lambda: flip(path, 0, 1), "damaged"),
        (lambda: flip(path, 30, 1), "damaged"),
        (lambda: os.truncate(path, 8192), "settings ask for"),
        (lambda: os.truncate(path, 0), "less than its header"),
    ):
        SharedRolloutBuffer.create(name, **ROOM).close()
        damage()
        with pytest.raises(CorruptionError, match=said):
            SharedRolloutBuffer.attach(name)


def read(path):
    # Never closed, as long as the buffer is in use: that would end its locks.
    fd = os.open(path, os.O_RDONLY)
    return os.pread(fd, os.fstat(fd).st_size, 0)


def flip(path, at, by):
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ by]), at)
