"""Waiting times, and what a place is worth to who waits."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.kvoffload.evict.reuse import BACK, Reuse, learn


def reuse_of(waits, phase="tool"):
    reuse = Reuse()
    for wait in waits:
        reuse.add(phase, max(1, round(wait)), then=BACK)
    return reuse


def search(waits, age):
    """Uses per tick of the best moment to give up, by the definition, on the waits themselves.

    Moments before which fewer than one in twenty ends are passed over, as noise.
    """
    left = np.sort([wait - age for wait in waits if wait > age])
    held = np.cumsum(left) + left * np.arange(len(left) - 1, -1, -1)
    rates = np.arange(1, len(left) + 1) / held
    return rates[len(left) // 20 :].max()


DRAWS = random.Random(1)
SHAPES = {
    "even": [DRAWS.uniform(500, 1500) for _ in range(4000)],
    "exponential": [DRAWS.expovariate(1 / 1000) for _ in range(4000)],
    "heavy": [1000 * DRAWS.lognormvariate(0, 1.5) for _ in range(4000)],
    "two kinds": [DRAWS.choice((100, 9000)) * DRAWS.uniform(0.9, 1.1) for _ in range(4000)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("age", [50, 300, 1000, 3000])
def test_worth_is_that_of_the_best_moment_to_give_up(shape, age):
    waits = SHAPES[shape]
    worth = reuse_of(waits).worth("tool", age)
    if max(waits) < age:
        assert worth == 0
    else:
        assert search(waits, age) / 1.3 < worth < search(waits, age) * 1.3


def test_the_longer_a_wait_of_known_length_the_more_it_is_worth():
    reuse = reuse_of(SHAPES["even"])
    worths = [reuse.worth("tool", age) for age in (0, 300, 600, 900, 1200)]
    assert worths == sorted(worths)


def test_heavy_tails_are_worth_less_and_less():
    reuse = reuse_of(SHAPES["heavy"])
    worths = [reuse.worth("tool", age) for age in (1000, 3000, 9000, 30_000)]
    assert worths == sorted(worths, reverse=True)


def test_who_may_never_come_back_is_worth_less():
    certain, doubtful = reuse_of([1000] * 200), reuse_of([1000] * 200)
    for _ in range(200):
        doubtful.add("tool", 1000, then=None)
    doubtful.add("tool", 1000, then=BACK)
    certain_worth, worth = certain.worth("tool", 0), doubtful.worth("tool", 0)
    assert worth == pytest.approx(certain_worth / 2, rel=0.1)


def test_a_turn_is_worth_what_follows_given_up_where_it_does_not_pay():
    """100 ticks of writing, then one of two tools, as likely: 10 ticks, or a million."""
    reuse = Reuse()
    for number in range(400):
        tool, ticks = [("quick", 10), ("slow", 1_000_000)][number % 2]
        reuse.add("writes", 100, then=tool)
        reuse.add(tool, ticks, then=BACK)
    # Half of the turns end in a use; the others are given up after 100 ticks.
    expected = 0.5 / (100 + 0.5 * 10)
    assert reuse.worth("writes", 0) == pytest.approx(expected, rel=0.25)
    assert reuse.worth("quick", 0) > 10 * reuse.worth("writes", 0)
    assert reuse.worth("slow", 0) < reuse.worth("writes", 0) / 100


def test_phases_in_a_row_are_looked_through():
    reuse = Reuse()
    for _ in range(200):
        for phase, then in (("writes", "tool"), ("tool", "queue"), ("queue", BACK)):
            reuse.add(phase, 100, then=then)
    found = [reuse.worth(phase, 0) for phase in ("queue", "tool", "writes")]
    assert found == pytest.approx([1 / 100, 1 / 200, 1 / 300], rel=0.25)


def test_nothing_known_is_least_recently_used():
    reuse = Reuse()
    worths = [reuse.worth("tool", age) for age in range(100)]
    assert worths == sorted(set(worths), reverse=True)
    assert learn({}) == {}


def test_an_unknown_phase_is_like_all_others():
    reuse = reuse_of([1000] * 200)
    assert reuse.worth("never seen", 10) == reuse.worth("tool", 10) > 0


def test_old_waits_fade():
    reuse = reuse_of([5000] * 5000)
    slow = reuse.worth("tool", 0)
    for _ in range(9000):
        reuse.add("tool", 10, then=BACK)
    assert reuse.worth("tool", 0) > 100 * slow


@given(st.lists(st.integers(1, 1 << 70), min_size=8, max_size=40), st.integers(0, 1 << 72))
def test_any_wait_and_any_age_has_a_worth(waits, age):
    reuse = Reuse()
    for number, wait in enumerate(waits * 3):
        reuse.add("tool", wait, then=(BACK, "tool", "other", None)[number % 4])
    assert 0 <= reuse.worth("tool", age) <= 1
