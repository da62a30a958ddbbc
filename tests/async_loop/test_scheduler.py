"""Limits on what an engine gets, and what becomes of requests that fail."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.async_loop import StalenessPolicy
from primeblocks.async_loop.scheduler import AdaptiveLimit, Retries
from primeblocks.errors import UsageError


def test_the_limit_grows_by_addition_while_it_binds_and_there_is_room():
    limit = AdaptiveLimit(start=10, most=20)
    assert [limit.observe(kv_used=0.3, in_flight=limit.limit) for _ in range(4)] == [14, 18, 20, 20]
    assert limit.observe(kv_used=0.3, in_flight=5) == 20  # It does not bind.
    assert limit.observe(kv_used=0.7, in_flight=20) == 20  # Neither room nor need.


def test_the_limit_is_cut_by_a_factor():
    for full in ({"kv_used": 0.95}, {"kv_used": 0.1, "waiting": 30}):
        limit = AdaptiveLimit(start=100, most=100, least=60)
        found = [limit.observe(in_flight=limit.limit, **full) for _ in range(4)]
        assert found == [80, 64, 60, 60]
    limit = AdaptiveLimit(start=100, most=100)
    assert limit.observe(kv_used=0.7, in_flight=100, preempted=3) == 80
    assert limit.observe(kv_used=0.7, in_flight=80, preempted=3) == 80  # None since.
    assert limit.observe(kv_used=0.7, in_flight=40, preempted=4) == 32  # Of what really runs.


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 200), st.integers(0, 3), st.integers(0, 50)))
)
def test_the_limit_stays_within_its_bounds(reports):
    limit, preempted = AdaptiveLimit(start=8, least=4, most=64), 0
    for kv_used, in_flight, more, waiting in reports:
        preempted += more
        found = limit.observe(
            kv_used=kv_used, in_flight=in_flight, preempted=preempted, waiting=waiting
        )
        assert 4 <= found == limit.limit <= 64


@pytest.mark.parametrize("wrong", [{"start": 0}, {"start": 9}, {"least": 3}])
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError, match="needs"):
        AdaptiveLimit(**({"start": 2, "most": 8} | wrong))


def test_room_counts_versions_that_the_engine_is_behind():
    def room(**counts):
        return StalenessPolicy(2, correction="a test").room(batch_size=4, **counts)

    assert room(in_flight=3, finished=5) == 4
    assert room(in_flight=3, finished=5, behind=1) == 0
    assert room(in_flight=1, finished=0, behind=2) == 3


def test_retries_wait_twice_as_long_each_time():
    retries = Retries(attempts=4, backoff_s=0.5)
    assert [retries.wait_s(attempt) for attempt in (1, 2, 3)] == [0.5, 1.0, 2.0]
    for wrong in ({"attempts": 0}, {"backoff_s": -1.0}, {"give_up_after": 0}):
        with pytest.raises(UsageError, match="needs attempts"):
            Retries(**wrong)


@given(
    versions=st.lists(st.integers(0, 6), max_size=12),
    running=st.lists(st.integers(0, 6), max_size=12),
    count=st.integers(1, 4),
    bound=st.integers(0, 3),
)
def test_waiting_is_ready_when_those_left_can_be_trained_on_in_time(
    versions, running, count, bound
):
    """Against the definition: take the oldest finished, then one batch a step, oldest first."""
    policy, version = StalenessPolicy(bound, "wait", "a test"), 6
    ready = policy.ready(versions, running, count=count, version=version)
    if len(versions) < count:
        assert not ready
        return
    outstanding = sorted(versions)[count:] + running
    late = any(
        started + bound < version + 1 + place // count
        for place, started in enumerate(sorted(outstanding))
    )
    possible = all(
        started + bound >= version + place // count
        for place, started in enumerate(sorted(versions + running))
    )
    if possible:  # As admission makes sure.
        assert ready == (not late)
