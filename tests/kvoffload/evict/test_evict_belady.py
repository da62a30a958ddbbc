"""Belady's rule against all possible choices, and every policy against Belady's rule."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import VersionAware, arc, lru
from primeblocks.kvoffload.evict.belady import belady, play
from primeblocks.kvoffload.evict.traces import Advance, End, Trace, Use, Wait

POLICIES = [lru, arc, VersionAware(0), VersionAware(2)]


def requests(numbers):
    """One page each; what was requested before is asked for."""
    seen, events = set(), []
    for number in numbers:
        key = PageKey("", bytes([number]), version=number % 3)
        events.append(Use(number % 2, (key,), int(number in seen)))
        seen.add(number)
    return Trace(tuple(events), working_pages=0)


def best(numbers, capacity):
    """The most hits over all choices of victims."""

    @cache
    def most(at, held):
        if at == len(numbers):
            return 0
        page = numbers[at]
        if page in held:
            return 1 + most(at + 1, held)
        if len(held) < capacity:
            return most(at + 1, held | {page})
        return max(most(at + 1, held - {victim} | {page}) for victim in held)

    return most(0, frozenset())


@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 4))
def test_no_choice_of_victims_has_more_hits(numbers, capacity):
    outcome = belady(requests(numbers), capacity_pages=capacity)
    assert outcome.hits == best(tuple(numbers), capacity)
    assert outcome.asked == len(numbers) - len(set(numbers))
    assert outcome.prefix_hits == outcome.hits


@given(
    st.lists(st.integers(0, 9) | st.sampled_from(["end", "wait", "advance"]), max_size=80),
    st.integers(1, 6),
    st.sampled_from(POLICIES),
)
def test_no_policy_has_more_hits(steps, capacity, evict):
    trace = requests([step for step in steps if isinstance(step, int)])
    uses, events, version = iter(trace.events), [], 0
    for at, step in enumerate(steps):
        version += step == "advance"
        other = {"end": End(at % 2), "wait": Wait(at % 2, "tool"), "advance": Advance(version)}
        events.append(other[step] if isinstance(step, str) else next(uses))
    trace = Trace(tuple(events), working_pages=0)
    outcome, oracle = (
        play(trace, evict=evict, capacity_pages=capacity),
        belady(trace, capacity_pages=capacity),
    )
    assert outcome.asked == oracle.asked
    assert outcome.hits <= oracle.hits


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 6))
def test_lru_hits_what_was_used_among_the_last_pages(numbers, capacity):
    """Outside oracle: the stack distance."""
    hits = 0
    for at, number in enumerate(numbers):
        if number in numbers[:at]:
            last = at - 1 - numbers[:at][::-1].index(number)
            hits += len(set(numbers[last + 1 : at])) < capacity
    assert play(requests(numbers), evict=lru, capacity_pages=capacity).hits == hits


def test_a_prefix_ends_at_the_first_page_that_is_missing():
    pages = tuple(PageKey("", bytes([number])) for number in range(4))
    other = PageKey("", b"other")
    turns = (Use("a", pages, 0), Use("a", pages[1:], 3), Use("b", (other,), 0), Use("a", pages, 4))
    outcome = play(Trace(turns, working_pages=5), evict=lru, capacity_pages=4)
    assert (outcome.asked, outcome.hits, outcome.prefix_hits) == (7, 6, 3)
    assert outcome.hit_rate == 6 / 7


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_tier_without_pages_is_refused(capacity):
    trace = Trace((), working_pages=0)
    with pytest.raises(PlanError, match=str(capacity)):
        belady(trace, capacity_pages=capacity)
    with pytest.raises(PlanError, match=str(capacity)):
        play(trace, evict=lru, capacity_pages=capacity)
