"""Waiting times, and when waiting is no longer worth it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.reuse import Gaps, patience


def gaps_of(waits):
    gaps = Gaps(memory_pages=4)
    for wait in waits:
        gaps.add(max(1, round(wait)))
    return gaps


def search(waits, ages):
    """The same by the definition, on the waits themselves."""

    def worth(age):
        left = [wait - age for wait in waits if wait > age]
        return max(
            sum(wait <= until for wait in left) / sum(min(wait, until) for wait in left)
            for until in left
        )

    fresh = worth(0)
    good = [age for age in ages if worth(age) >= fresh]
    return max(good, default=0)


def test_without_gaps_nothing_is_worth_waiting_for():
    assert Gaps(memory_pages=4).patience() == 0.0
    assert patience([0] * 128) == 0.0


def test_pages_that_return_on_time_are_waited_for():
    assert 1000 <= gaps_of([1000] * 2000).patience() <= 1024


def test_the_longer_the_wait_the_sooner_the_return():
    draw = random.Random(1)
    waits = [draw.uniform(500, 1500) for _ in range(4000)]
    assert 1000 < gaps_of(waits).patience() <= 1536


@pytest.mark.parametrize(("sigma", "answer"), [(1.0, 1750), (1.5, 350)])
def test_heavy_tails_are_given_up_early(sigma, answer):
    """The answer is where the density over the survival falls below the best `P / E`; by hand."""
    draw = random.Random(2)
    waits = [1000 * draw.lognormvariate(0, sigma) for _ in range(8000)]
    assert answer / 1.6 < gaps_of(waits).patience() < answer * 1.6


def test_a_late_minority_is_given_up_and_the_rest_is_waited_for():
    draw = random.Random(3)
    soon = [200 + draw.expovariate(1 / 100) for _ in range(300)]
    late = [20_000 * draw.lognormvariate(0, 1) for _ in range(100)]
    found = gaps_of(soon + late).patience()
    near = search(soon + late, ages=range(1, 3000, 100))
    assert 200 < found < 1500
    assert near / 2 <= found <= near * 2


@given(st.integers(1, 1 << 70))
def test_any_wait_has_a_bucket(ticks):
    gaps = Gaps(memory_pages=1)
    gaps.add(ticks)


def test_old_gaps_fade():
    gaps = gaps_of([5000] * 66_000)
    for _ in range(10_000):
        gaps.add(10)
    assert gaps.patience() < 20


def test_pages_that_left_are_remembered_up_to_a_number():
    gaps = Gaps(memory_pages=2)
    keys = [PageKey("", bytes([number])) for number in range(3)]
    for at, key in enumerate(keys):
        gaps.leave(key, at)
    assert [gaps.back(key) for key in keys] == [None, 1, 2]
    assert gaps.back(keys[1]) is None
