"""The buffer against a list: nothing lost, nothing twice, nothing stale."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from primeblocks.async_loop import RolloutBuffer, StalenessPolicy
from primeblocks.errors import DeadlineError, UsageError
from primeblocks.testing.faults import ManualClock
from tests.deadlines import HANG_S

from .conftest import make_group

BOUND = 2
COMMANDS = st.lists(
    st.one_of(
        st.just(("put", 0)),
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("advance"), st.integers(1, 2)),
    ),
    max_size=40,
)


@given(COMMANDS)
def test_it_behaves_as_a_list(commands):
    async def run():
        buffer = RolloutBuffer(capacity=4, staleness=StalenessPolicy(BOUND, "drop", "a test"))
        expected, seen, version, made = [], [], 0, 0
        for command, number in commands:
            if command == "advance":
                version += number
            elif command == "put" and len(expected) < 4:
                await buffer.put(make_group(made, version=version), timeout_s=HANG_S)
                expected.append((made, version))
                made += 1
            elif command == "take":
                fresh = [item for item in expected if version - item[1] <= BOUND]
                if len(fresh) < number:
                    continue  # it would wait
                dropped = []
                groups = await buffer.take(
                    number, version=version, timeout_s=HANG_S, on_drop=dropped.append
                )
                assert [group.prompt for group in groups] == [p for p, _ in fresh[:number]]
                assert all(version - group.version <= BOUND for group in groups)
                stale = [item for item in expected if item not in fresh]
                assert [group.prompt for group in dropped] == [p for p, _ in stale]
                seen += [group.prompt for group in (*groups, *dropped)]
                expected = fresh[number:]
            assert len(buffer) == len(expected)
        assert len(seen) == len(set(seen))
        assert sorted(seen + [prompt for prompt, _ in expected]) == list(range(made))

    asyncio.run(run())


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("cancel"), st.integers(0, 9)),
            st.tuples(st.just("ticks"), st.integers(1, 4)),
            st.sampled_from([("take", 0), ("put", 0)]),
        ),
        max_size=25,
    )
)
@example([("put", 0), ("put", 0), ("ticks", 3), ("cancel", 1), ("take", 0), ("ticks", 4)])
def test_a_put_that_was_cancelled_leaves_nothing_in_the_buffer(commands):
    async def run():
        buffer = RolloutBuffer(capacity=1, staleness=StalenessPolicy(BOUND, "drop", "a test"))
        puts, takes = {}, []
        for command, number in commands:
            if command == "put":
                group = make_group(len(puts), version=0)
                puts[group] = asyncio.ensure_future(buffer.put(group, timeout_s=HANG_S))
            elif command == "cancel" and number < len(puts):
                [*puts.values()][number].cancel()
            elif command == "take" and all(take.done() for take in takes):
                takes.append(asyncio.ensure_future(buffer.take(1, version=0, timeout_s=HANG_S)))
            elif command == "ticks":
                for _ in range(number):
                    await asyncio.sleep(0)
        while not all(take.done() for take in takes):
            group = make_group(len(puts), version=0)
            puts[group] = asyncio.ensure_future(buffer.put(group, timeout_s=HANG_S))
            for _ in range(20):
                await asyncio.sleep(0)
        taken = [take.result()[0] for take in takes]
        for put in puts.values():
            put.cancel()
        await asyncio.gather(*puts.values(), return_exceptions=True)
        left = [group for group, put in puts.items() if not put.cancelled() and group not in taken]
        assert len(set(taken)) == len(taken)
        assert len(buffer) == len(left)
        for group in left:
            assert await buffer.take(1, version=0, timeout_s=HANG_S) == (group,)
        await buffer.put(make_group("last", version=0), timeout_s=HANG_S)

    asyncio.run(run())


def test_groups_of_a_later_policy_end_the_take_and_stay_or_are_handed_over(make_group):
    async def run():
        buffer = RolloutBuffer(capacity=3, staleness=StalenessPolicy(9, correction="a test"))
        for name, version in (("late", 5), ("good", 3), ("later", 6)):
            await buffer.put(make_group(name, version=version), timeout_s=HANG_S)
        with pytest.raises(UsageError, match=r"policy 3 .*'late'.* the later policy 5"):
            await buffer.take(1, version=3, timeout_s=HANG_S)
        assert len(buffer) == 3
        dropped = []
        with pytest.raises(UsageError, match=r"policy 3 .* the later policy"):
            await buffer.take(1, version=3, timeout_s=HANG_S, on_drop=dropped.append)
        assert [group.prompt for group in dropped] == ["late", "later"]
        (group,) = await buffer.take(1, version=3, timeout_s=HANG_S, on_drop=dropped.append)
        assert (group.prompt, len(buffer)) == ("good", 0)

    asyncio.run(run())


def test_a_full_buffer_holds_back_until_there_is_room(make_group):
    async def run():
        buffer = RolloutBuffer(capacity=1, staleness=StalenessPolicy(0, "drop", "a test"))
        await buffer.put(make_group("a"), timeout_s=HANG_S)
        waiting = asyncio.create_task(buffer.put(make_group("b"), timeout_s=HANG_S))
        await asyncio.sleep(0)
        assert not waiting.done()
        groups = await buffer.take(1, version=0, timeout_s=HANG_S)
        await waiting
        assert [group.prompt for group in groups] == ["a"]
        assert len(buffer) == 1

    asyncio.run(run())


def test_waits_end_at_their_deadline_and_lose_nothing(make_group):
    async def run():
        clock = ManualClock()
        buffer = RolloutBuffer(
            capacity=1, staleness=StalenessPolicy(0, "drop", "a test"), clock=clock
        )
        taking = asyncio.create_task(buffer.take(1, version=0, timeout_s=HANG_S))
        await settle()
        clock.advance(HANG_S)
        with pytest.raises(DeadlineError, match="1 groups"):
            await taking
        await buffer.put(make_group("a"), timeout_s=HANG_S)
        putting = asyncio.create_task(buffer.put(make_group("b"), timeout_s=HANG_S))
        await settle()
        clock.advance(HANG_S)
        with pytest.raises(DeadlineError, match="room"):
            await putting
        groups = await buffer.take(1, version=0, timeout_s=HANG_S)
        assert [group.prompt for group in groups] == ["a"]

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(6))
def test_a_put_whose_deadline_passes_while_a_take_comes_fails_only_if_nobody_gets_the_group(turns):
    async def run():
        clock = ManualClock()
        buffer = RolloutBuffer(
            capacity=1, staleness=StalenessPolicy(0, "drop", "a test"), clock=clock
        )
        await buffer.put(make_group("a"), timeout_s=HANG_S)
        putting = asyncio.create_task(buffer.put(make_group("b"), timeout_s=HANG_S))
        await settle()
        clock.advance(HANG_S)
        for _ in range(turns):
            await asyncio.sleep(0)
        taken = await buffer.take(1, version=0, timeout_s=HANG_S)
        taking = asyncio.create_task(buffer.take(1, version=0, timeout_s=HANG_S))
        await settle()
        taken += taking.result() if taking.done() else ()
        taking.cancel()
        (error,) = await asyncio.gather(putting, return_exceptions=True)
        assert [group.prompt for group in taken] == ["a", "b"][: 1 + (error is None)]

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(8))
def test_a_take_that_was_cancelled_leaves_its_batch_in_the_buffer(turns):
    async def run():
        buffer = RolloutBuffer(capacity=2, staleness=StalenessPolicy(0, "drop", "a test"))
        taking = asyncio.create_task(buffer.take(1, version=0, timeout_s=HANG_S))
        await settle()
        await buffer.put(make_group("a"), timeout_s=HANG_S)
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        (taken,) = await asyncio.gather(taking, return_exceptions=True)
        assert len(buffer) == isinstance(taken, asyncio.CancelledError)

    asyncio.run(run())


def test_a_wait_for_an_older_group_says_so(make_group):
    async def run():
        clock = ManualClock()
        policy = StalenessPolicy(1, "wait", "a test")
        buffer = RolloutBuffer(capacity=2, staleness=policy, clock=clock)
        await buffer.put(make_group("a", version=1), timeout_s=HANG_S)
        take = buffer.take(1, version=1, timeout_s=HANG_S, in_flight=lambda: [0])
        taking = asyncio.create_task(take)
        await settle()
        clock.advance(HANG_S)
        with pytest.raises(DeadlineError, match="1 groups were finished. on_stale=.wait. waited"):
            await taking

    asyncio.run(run())


def test_stale_groups_make_room_for_those_that_wait(make_group):
    async def run():
        buffer = RolloutBuffer(capacity=1, staleness=StalenessPolicy(0, "drop", "a test"))
        await buffer.put(make_group("old", version=0), timeout_s=HANG_S)
        putting = asyncio.create_task(buffer.put(make_group("new", version=1), timeout_s=HANG_S))
        await settle()
        dropped = []
        groups = await buffer.take(1, version=1, timeout_s=HANG_S, on_drop=dropped.append)
        await putting
        assert [group.prompt for group in groups] == ["new"]
        assert [group.prompt for group in dropped] == ["old"]

    asyncio.run(run())


def test_impossible_sizes_are_refused():
    policy = StalenessPolicy(0, "drop", "a test")
    with pytest.raises(UsageError, match="0"):
        RolloutBuffer(capacity=0, staleness=policy)
    with pytest.raises(UsageError, match="3 groups"):
        asyncio.run(
            RolloutBuffer(capacity=2, staleness=policy).take(3, version=0, timeout_s=HANG_S)
        )


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)
