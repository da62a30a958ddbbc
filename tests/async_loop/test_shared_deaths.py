"""SIGKILL of producers and consumers: nobody is held up, nothing is lost, torn or taken twice."""

import os
import random
import signal
import sys
from types import SimpleNamespace

import pytest

from primeblocks.async_loop import StalenessPolicy
from primeblocks.async_loop.plan.virtual import VirtualClock, run_in_virtual_time
from primeblocks.async_loop.shared import SharedRolloutBuffer, arena, room, scatter
from primeblocks.errors import DeadlineError, UsageError
from tests.deadlines import HANG_S

from .conftest import make_group
from .shared_site import ALL, SHM, Child, die_at, name, plain, say_changes

KILLED = -signal.SIGKILL
pytestmark = pytest.mark.stress
POLICY = StalenessPolicy(0, "drop", "a test")
__all__ = ["name"]  # A fixture.


def steps_of(name, body, *, full):
    """Steps of a child to kill it at: all, or those that changed something, and those before."""
    ended, heard = Child(lambda say: body(lambda: say_changes(name, say))).wait()
    assert ended == 0
    changes = [*map(int, heard)]
    return range(changes[-1] + 9) if full else sorted({*changes, *(each + 1 for each in changes)})


def test_a_producer_killed_at_any_change_leaves_a_whole_group_or_none(name, full):
    """The buffer has room for one group: what the dead held is in the way until it is freed."""
    with SharedRolloutBuffer.create(
        name, capacity=1, capacity_bytes=2048, staleness=POLICY
    ) as buffer:
        group = make_group("killed", members=1)

        def body(begin):
            attached = SharedRolloutBuffer.attach(name)
            begin()
            attached.put(group, timeout_s=0)

        steps = steps_of(name, body, full=full)
        buffer.take(1, version=0, timeout_s=0)
        added = []
        for step in steps:
            child = Child(lambda say, step=step: body(lambda: die_at(step)))
            assert child.wait()[0] == KILLED
            added.append(len(buffer))
            if added[-1]:
                (taken,) = buffer.take(1, version=0, timeout_s=0)
                assert plain(taken) == plain(group)
            buffer.put(make_group(step), timeout_s=0)
            (taken,) = buffer.take(1, version=0, timeout_s=0)
            assert plain(taken) == plain(make_group(step))
            assert (len(buffer), buffer.held_bytes) == (0, 0)
        # There is one store before which it is not in, and after which it is.
        assert added == sorted(added)
        assert {*added} == {0, 1}


def test_a_consumer_killed_at_any_change_has_taken_its_batch_or_nothing(name, full):
    with SharedRolloutBuffer.create(
        name, capacity=3, capacity_bytes=6 << 10, staleness=POLICY
    ) as buffer:

        def put(prompts):
            for prompt in prompts:
                buffer.put(make_group(prompt, members=1), timeout_s=0)

        def body(begin):
            attached = SharedRolloutBuffer.attach(name)
            begin()
            attached.take(2, version=0, timeout_s=0)

        put("abc")
        each = buffer.held_bytes // 3
        steps = steps_of(name, body, full=full)
        buffer.take(1, version=0, timeout_s=0)
        left = []
        for step in steps:
            put("abc")
            child = Child(lambda say, step=step: body(lambda: die_at(step)))
            assert child.wait()[0] == KILLED
            left.append(len(buffer))
            if left[-1] == 1:
                # A consumer is the first to meet what the dead one left, or a producer.
                if step % 2:
                    with pytest.raises(DeadlineError):
                        buffer.take(2, version=0, timeout_s=0)
                    assert buffer.held_bytes == each
                put("ab")
            groups = buffer.take(1, version=0, timeout_s=0)  # Fewer than the dead one chose.
            assert buffer.held_bytes == 2 * each
            groups += buffer.take(2, version=0, timeout_s=0)
            assert [group.prompt for group in groups] == [*("abc" if left[-1] == 3 else "cab")]
            assert (len(buffer), buffer.held_bytes) == (0, 0)
        assert left == sorted(left, reverse=True)
        assert {*left} == {1, 3}


@pytest.mark.parametrize("step", range(0, 160, 20))
def test_a_stale_group_is_reported_though_the_consumer_dies(name, step):
    with SharedRolloutBuffer.create(
        name, capacity=2, capacity_bytes=4 << 10, staleness=POLICY
    ) as buffer:
        buffer.put(make_group("old", members=1), timeout_s=0)
        buffer.put(make_group("new", members=1, version=1), timeout_s=0)

        def body(say):
            attached = SharedRolloutBuffer.attach(name)
            die_at(step)
            attached.take(1, version=1, timeout_s=0, on_drop=say)
            sys.settrace(None)
            say("taken")

        ended, heard = Child(body).wait()
        assert ended in {0, KILLED}
        if heard[-1:] != ["taken"] and len(buffer):
            buffer.take(1, version=1, timeout_s=0, on_drop=lambda ordinal: heard.append("0"))
        assert "0" in heard
        assert (len(buffer), buffer.held_bytes) == (0, 0)


def test_producers_killed_over_and_over_beside_a_consumer(name, full):
    """Every group whose put has returned is taken once; of the others, none is taken twice."""
    draw = random.Random(0)
    taken, acknowledged, killed = [], [], 0
    with SharedRolloutBuffer.create(
        name, capacity=8, capacity_bytes=24 << 10, staleness=POLICY
    ) as buffer:
        for batch in range(500 if full else 25):
            children = []
            for producer in range(3):
                step = draw.choice([draw.randrange(12_000), 10**9])

                def body(say, at=(batch, producer), step=step):
                    attached = SharedRolloutBuffer.attach(name)
                    die_at(step, code=ALL, opcodes=True)
                    for number in range(2):
                        one = make_group([*at, number], members=1 + number)
                        attached.put(one, timeout_s=HANG_S)
                        say(one.prompt)

                children.append(Child(body))
            for child in children:
                ended, heard = child.wait()
                assert ended in {0, KILLED}
                killed += ended == KILLED
                acknowledged += heard
            while count := len(buffer):
                assert count <= 8
                assert buffer.held_bytes <= 24 << 10
                taken += buffer.take(count, version=0, timeout_s=HANG_S)
        buffer.put(make_group("last"), timeout_s=0)
        taken += buffer.take(1, version=0, timeout_s=0)
        assert buffer.held_bytes == 0
    prompts = [str(group.prompt) for group in taken]
    assert len(prompts) == len({*prompts})
    assert {*acknowledged} <= {*prompts}
    for group in taken[:-1]:
        assert plain(group) == plain(make_group(group.prompt, members=1 + group.prompt[2]))
    assert killed > len(children)


def test_a_creator_killed_at_any_line_leaves_a_whole_buffer_or_none(name, full):
    stride = 1 if full else 2
    path, there = SHM / f"primeblocks-{name}", []

    def body(say):
        die_at(stride * len(there))
        SharedRolloutBuffer.create(name, capacity=1, capacity_bytes=2048, staleness=POLICY)

    while Child(body).wait()[0] == KILLED:
        there.append(path.exists())
        if there[-1]:
            with SharedRolloutBuffer.attach(name) as buffer:
                buffer.put(make_group("a", members=1), timeout_s=0)
                assert len(buffer) == 1
                buffer.unlink()
        assert not [*SHM.glob(f"primeblocks-{name}*")]
    assert there == sorted(there)
    assert {*there} == {False, True}


def test_what_the_dead_left_under_a_name_is_replaced_and_what_is_in_use_is_not(name):
    sizes = {"capacity": 2, "capacity_bytes": 4 << 10, "staleness": POLICY}

    def body(say):
        SharedRolloutBuffer.create(name, **sizes).put(make_group("a"), timeout_s=0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert Child(body).wait()[0] == KILLED
    with SharedRolloutBuffer.create(name, **sizes) as buffer:
        assert len(buffer) == 0

        def create(say):
            try:
                SharedRolloutBuffer.create(name, **sizes)
            except UsageError as error:
                say("a process has it open" in str(error))

        assert Child(create).wait() == (0, ["True"])


def test_whoever_dies_the_groups_stay_for_who_attaches(name):
    sizes = {"capacity": 2, "capacity_bytes": 4 << 10, "staleness": POLICY}

    def body(say):
        SharedRolloutBuffer.create(name, **sizes).put(make_group("a"), timeout_s=0)

    assert Child(body).wait()[0] == 0
    with SharedRolloutBuffer.attach(name) as buffer:
        assert buffer.staleness == POLICY
        assert [group.prompt for group in buffer.take(1, version=0, timeout_s=0)] == ["a"]


def test_nobody_waits_for_one_that_waits_and_is_stopped(name):
    """It is given its room in its turn, looking or not, and so is who comes after it."""
    with SharedRolloutBuffer.create(
        name, capacity=3, capacity_bytes=6 << 10, staleness=POLICY
    ) as buffer:
        for group in "abc":
            buffer.put(make_group(group, members=1), timeout_s=0)

        def body(say):
            attached = SharedRolloutBuffer.attach(name)
            room.time = SimpleNamespace(sleep=lambda _: os.kill(os.getpid(), signal.SIGSTOP))
            attached.put(make_group("stopped", members=1), timeout_s=HANG_S)

        child = Child(body)
        child.wait_until_stopped()
        taken = buffer.take(2, version=0, timeout_s=0)
        buffer.put(make_group("d", members=1), timeout_s=0)
        with pytest.raises(DeadlineError):  # The third place is the stopped one's.
            buffer.put(make_group("e", members=1), timeout_s=0)
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait() == (0, [])
        taken += buffer.take(3, version=0, timeout_s=0)
        assert [group.prompt for group in taken] == ["a", "b", "c", "d", "stopped"]
        assert buffer.held_bytes == 0


def test_a_stopped_process_holds_others_up_until_their_deadline(name):
    sizes = {"capacity": 2, "capacity_bytes": 4 << 10, "staleness": POLICY}

    def body(say):
        attached = SharedRolloutBuffer.attach(name)
        die_at(0, signal.SIGSTOP, code=(scatter.__file__,))
        attached.put(make_group("stopped", members=1), timeout_s=0)

    def locks(say):
        attached = SharedRolloutBuffer.attach(name)
        die_at(8, signal.SIGSTOP, code=(arena.__file__,))
        attached.put(make_group("locks", members=1), timeout_s=0)

    async def run():
        clock = VirtualClock()
        with SharedRolloutBuffer.create(name, **sizes, clock=clock) as buffer:
            # Stopped while it writes, it is in nobody's way; with the table locked, in everybody's.
            writes = Child(body)
            writes.wait_until_stopped()
            await buffer.put_async(make_group("a", members=1), timeout_s=HANG_S)
            assert len(await buffer.take_async(1, version=0, timeout_s=HANG_S)) == 1
            locked = Child(locks)
            locked.wait_until_stopped()
            for call in (
                buffer.put_async(make_group("b", members=1), timeout_s=HANG_S),
                buffer.take_async(1, version=0, timeout_s=HANG_S),
            ):
                with pytest.raises(DeadlineError, match="stopped"):
                    await call
            for child in (writes, locked):
                os.kill(child.pid, signal.SIGKILL)
                assert child.wait()[0] == KILLED
            for group in "cd":
                await buffer.put_async(make_group(group, members=1), timeout_s=HANG_S)
            groups = await buffer.take_async(2, version=0, timeout_s=HANG_S)
            assert [group.prompt for group in groups] == ["c", "d"]
            assert buffer.held_bytes == 0

    run_in_virtual_time(run())
