"""The model of an engine's own cache, on traces small enough to follow by hand."""

import pytest

from benchmarks.kvoffload_parts.eviction_engine import Ask, Ours, Queue, Resume, Save, behind, play
from benchmarks.kvoffload_parts.eviction_policies import Lru
from benchmarks.kvoffload_parts.eviction_traces import Advance, End, Trace, Use, Wait
from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import VersionAware


def pages(name, *numbers):
    return tuple(PageKey("", f"{name}{number}".encode()) for number in numbers)


def seen(*events, engine_pages):
    return behind(Trace(events, working_pages=0), engine_pages=engine_pages)


A, B = pages("a", 0, 1, 2), pages("b", 0, 1)
TURNS = (
    Use("a", A[:2], 0),
    Use("a", A[2:], 0),  # written in this turn
    Wait("a", "tool"),
    Use("b", B, 0),
    Wait("b", "queue"),
    Use("a", A, 3),
    End("a"),
)


def asks(found):
    return [step.pages for step in found.steps if isinstance(step, Ask)]


@pytest.mark.parametrize(
    ("engine_pages", "asked"), [(5, []), (4, [A[2:]]), (3, [A[1:]]), (2, [A]), (0, [A])]
)
def test_the_tier_is_asked_for_what_the_engine_lost_the_last_page_first(engine_pages, asked):
    found = seen(*TURNS, engine_pages=engine_pages)
    assert asks(found) == asked
    assert (found.asked, found.used) == (sum(map(len, asked)), 3)


def test_pages_of_a_request_that_runs_are_held():
    other = Use("b", B, 0)
    assert asks(seen(Use("a", A, 0), other, Use("a", (), 0), engine_pages=1)) == []
    shared = seen(Use("a", A, 0), other, Use("c", A, 3), engine_pages=1)
    assert asks(shared) == []


def test_the_steps_of_a_turn():
    found = seen(*TURNS, Advance(1), engine_pages=3)
    kinds = [type(step) for step in found.steps]
    first = [Resume, Save, Save, Wait, Resume, Save, Queue]
    assert kinds == [*first, Resume, Ask, Save, End, Advance]
    assert found.steps[6].rollouts == ("b",)


def test_the_queue_is_told_whole_when_one_comes_and_when_one_goes():
    waits = [Wait(name, "queue") for name in "abc"]
    found = seen(*waits, Use("a", A, 0), End("b"), engine_pages=9)
    queues = [step.rollouts for step in found.steps if isinstance(step, Queue)]
    assert queues == [("a",), ("a", "b"), ("a", "b", "c"), ("b", "c"), ("c",)]


def test_only_a_prefix_without_holes_counts():
    found = seen(*TURNS, engine_pages=2)
    tiers = Lru(5), Lru(4), Lru(2)
    assert [play(found, tier).hits for tier in tiers] == [3, 0, 0]
    assert tiers[1].keys.keys() == {*A, B[1]}


@pytest.mark.parametrize(("fact", "left"), [(Advance(2), "new"), (End("b"), "old"), (None, "new")])
def test_versions_and_ends_reach_the_policy(fact, left):
    """Without a fact the least recently used page leaves, which is the older."""
    old, new = (PageKey("", b"x", version=version) for version in (0, 2))
    events = [Use("a", (old,), 0), Wait("a", "tool"), Use("b", (new,), 0), Wait("b", "tool")]
    touched = [Use("a", (old,), 1), Wait("a", "tool")] if isinstance(fact, Advance) else []
    third = Use("c", pages("c", 0), 0)
    found = seen(*events, *touched, *([fact] if fact else []), third, engine_pages=0)
    tier = Ours(VersionAware(1), 2)
    play(found, tier)
    assert (old in tier, new in tier) == (left == "old", left == "new")
