"""Choices of a victim from lanes equal those of a search through all pages."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import VersionAware, lru
from primeblocks.kvoffload.evict.evict import Candidate, Live, Snapshot
from primeblocks.kvoffload.evict.ledger import Ledger
from tests.kvoffload.evict.plain_ledger import CAPACITY, Plain, histories, long_history, play


def search_lru(plain):
    return min(plain.pages, key=lambda page: page.last_used).key, True


def search_version_aware(plain, *, last_live):
    dead = [p for p in plain.pages if p.version is not None and p.version < last_live]
    if dead:
        return min(dead, key=lambda page: (page.version, page.last_used)).key, False
    if ended := [page for page in plain.pages if page.sort == "ended"]:
        return min(ended, key=lambda page: page.place).key, False
    return plain.live()[0][2], True


@pytest.mark.stress
@given(histories)
def test_lru_takes_the_oldest_use_of_all(history):
    ledger, plain = Ledger(capacity_pages=CAPACITY, remembers=1), Plain()
    play(
        history,
        ledger,
        plain,
        lambda version: (ledger.victim(lru, version=version), search_lru(plain)),
    )


def play_version_aware(history, staleness):
    ledger, plain = Ledger(capacity_pages=CAPACITY, remembers=1), Plain()

    def victims(version):
        ours = ledger.victim(VersionAware(staleness), version=version)
        theirs = search_version_aware(plain, last_live=version - staleness)
        best, *others = plain.live() or [(0, 0, None)]
        tied = [(key, True) for *worth, key in others if worth == [*best[:2]]]
        return ours, ours if theirs == (best[2], True) and ours in tied else theirs

    play(history, ledger, plain, victims)


@pytest.mark.stress
@given(histories, st.integers(0, 2))
def test_version_aware_equals_a_search_through_all_pages(history, staleness):
    play_version_aware(history, staleness)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(20))
def test_what_is_learned_equals_a_search_through_all_pages(seed):
    play_version_aware(long_history(Random(seed)), 0)


def page(number, version=None, *, rollouts=None):
    key = PageKey("", bytes([number]), version=version)
    return Candidate(key, last_used=number, rollouts=rollouts)


def snapshot(*live, by_version=(), ended=None):
    return Snapshot(5, live[0].page, None, 0, 0.0, False, by_version, ended, live)


DEAD, DEADER = page(0, 2), page(1, 1)
ENDED = page(2, 5, rollouts=set())
OLD = Live(page(4, 5, rollouts={2}), 0.5, since=1)
NEW = Live(page(5, 5, rollouts={3}), 0.1, since=9)
EQUAL = Live(page(6, 3, rollouts={4}), 0.1, since=3)


@pytest.mark.parametrize(
    ("seen", "victim", "demote"),
    [
        (snapshot(OLD, by_version=[DEAD, OLD.page, DEADER], ended=ENDED), DEADER, False),
        (snapshot(OLD, by_version=[DEAD, OLD.page], ended=ENDED), DEAD, False),
        (snapshot(OLD, by_version=[OLD.page, EQUAL.page, page(7)], ended=ENDED), ENDED, False),
        (snapshot(OLD, NEW), NEW.page, True),
        (snapshot(OLD, NEW, EQUAL), EQUAL.page, True),
        (snapshot(OLD), OLD.page, True),
    ],
)
def test_who_goes_first(seen, victim, demote):
    choice = VersionAware(2)(seen)
    assert (choice.page, choice.demote) == (victim, demote)


def test_negative_staleness_is_refused():
    with pytest.raises(PlanError, match="-1"):
        VersionAware(-1)


def key_of(number):
    return PageKey("", number.to_bytes(2), version=0)


def use(ledger, number, *rollouts, **how):
    ledger.touch(key_of(number), rollouts=rollouts, **how)
    return key_of(number)


def victim(ledger):
    return ledger.victim(VersionAware(0), version=0)[0]


def test_the_last_page_of_a_rollout_leaves_before_those_in_front_of_it():
    ledger = Ledger(capacity_pages=9)
    keys = [use(ledger, number, "a") for number in range(3)]
    use(ledger, 9, "b")
    left = []
    for _ in keys:
        left.append(victim(ledger))
        ledger.evicted(left[-1])
    assert left == keys[::-1]


def test_demoted_pages_go_in_front_of_those_that_were_behind_them():
    ledger = Ledger(capacity_pages=9)
    keys = [use(ledger, number, "a", front=True) for number in range(3)]
    assert victim(ledger) == keys[0]


def test_a_prompt_that_one_sample_still_uses_leaves_after_its_own_pages():
    ledger = Ledger(capacity_pages=9)
    prompt = [use(ledger, 0, "a"), use(ledger, 0, "b")][0]
    own = use(ledger, 1, "b")
    ledger.end("a")
    assert victim(ledger) == own
    ledger.evicted(own)
    assert victim(ledger) == prompt


def test_a_rollout_that_waits_for_a_quick_tool_outlives_one_that_waits_for_a_slow_one():
    ledger = Ledger(capacity_pages=9)
    rollouts = {"quick": (1, 3), "slow": (2, 300)}
    for tool, (number, uses) in 20 * tuple(rollouts.items()):
        use(ledger, number, tool)
        ledger.wait(tool, tool)
        for _ in range(uses):
            use(ledger, 99, "busy")
        use(ledger, number, tool)
    ledger.remove(key_of(99))
    for first, second in (("quick", "slow"), ("slow", "quick")):
        for tool in (first, second):
            use(ledger, rollouts[tool][0], tool)
            ledger.wait(tool, tool)
        assert victim(ledger) == key_of(2)


def test_the_queue_is_kept_in_its_order():
    """Each is served after the same time; the last to come waits longest."""
    ledger = Ledger(capacity_pages=40)
    for number in range(200):
        use(ledger, number % 10, number % 10)
        ledger.wait(number % 10, "queue")
    waiting = [use(ledger, number, number) for number in range(10)]
    for number in range(10):
        ledger.wait(number, "queue")
        use(ledger, 77, "busy")
    ledger.remove(key_of(77))
    assert victim(ledger) == waiting[-1]


def test_a_page_of_a_sibling_says_nothing_of_who_waits():
    """A prompt that comes back brings its other users along: they still wait."""
    told, all_did = Ledger(capacity_pages=9), Ledger(capacity_pages=9)
    for ledger, by in ((told, ("a",)), (all_did, None)):
        for name in "ab":
            use(ledger, 0, name)
            ledger.wait(name, "tool")
        use(ledger, 0, "a", "b", by=by)
        ledger.remove(key_of(0))
        use(ledger, 1, "a")
        use(ledger, 2, "b")
    assert len(told.snapshot(version=0).live) == 2
    # Both write: one lane, with both at its ends.
    phases = [len(ledger._rollouts._lanes) for ledger in (told, all_did)]
    assert phases == [2, 1]


def test_a_choice_looks_at_lanes_not_at_pages():
    ledger = Ledger(capacity_pages=10_000)
    for number in range(5000):
        key = PageKey("", number.to_bytes(2), version=number % 5)
        ledger.touch(key, rollouts=(number % 500,))
    for name in range(500):
        ledger.wait(name, f"tool {name}")
    seen = ledger.snapshot(version=5)
    assert len(seen.by_version) == 5
    assert len(seen.live) == 32 + 2


def test_rollouts_that_never_end_are_forgotten_without_their_pages():
    ledger = Ledger(capacity_pages=10, remembers=1)
    for name in range(1000):
        use(ledger, name, name)
        ledger.remove(key_of(name))
        ledger.wait(f"other {name}", "tool")
    assert len(ledger._rollouts._all) <= 10


def test_a_rollout_that_has_pages_again_is_not_forgotten():
    ledger = Ledger(capacity_pages=2, remembers=1)
    ledger.wait("a", "tool")
    page = use(ledger, 0, "a")
    for name in range(9):
        ledger.wait(name, "tool")
    ledger.end("a")
    assert ledger.rollouts(page) == ()
    assert ledger.snapshot(version=0).ended.key == page
