"""Facts of a tier, and the choices made from them."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import (
    Facts,
    RolloutAware,
    VersionAware,
    facts_of,
    lru,
)
from primeblocks.kvoffload.evict.ledger import PageLedger
from tests.kvoffload.evict.plain_ledger import Plain, histories, long_history, play


def key_of(number, version=None):
    return PageKey("", number.to_bytes(2), version=version)


def ledger_for(policy=None):
    return PageLedger(policy or RolloutAware())


def use(ledger, number, *rollouts, **how):
    ledger.touch(key_of(number), rollouts=rollouts, **how)
    return key_of(number)


def leave(ledger, *, pages=1):
    left = []
    for _ in range(pages):
        left.append(ledger.victim(version=0)[0])
        ledger.remove(left[-1])
    return left


def test_a_policy_pays_for_the_facts_that_it_declares():
    assert facts_of(lru) == Facts.NONE
    assert facts_of(VersionAware(1)) == Facts.VERSIONS | Facts.ENDS
    assert facts_of(RolloutAware()) == ~Facts.NONE
    ledger = ledger_for(lru)
    ledger.touch(key_of(0, version=1), rollouts=("a",))
    ledger.pause("a", "tool")
    ledger.queue(["a"])
    seen = ledger.snapshot(version=9)
    assert (seen.by_version, seen.ended, seen.live) == ([], None, [])
    assert ledger.rollouts(key_of(0, version=1)) == ()


@pytest.mark.parametrize("policy", [VersionAware, RolloutAware])
def test_negative_staleness_is_refused(policy):
    with pytest.raises(PlanError, match="-1"):
        policy(-1)


@pytest.mark.parametrize("policy", [VersionAware(1), RolloutAware(1)])
def test_stale_versions_go_first_then_what_ended_and_neither_is_demoted(policy):
    ledger = ledger_for(policy)
    ledger.touch(key_of(0, version=5), rollouts=("live",))
    ledger.touch(key_of(1, version=5), rollouts=("done",))
    ledger.touch(key_of(2, version=3), rollouts=("live",))
    ledger.touch(key_of(3, version=2), rollouts=("live",))
    ledger.end("done")
    left = []
    for _ in range(4):
        left.append(ledger.victim(version=5))
        ledger.remove(left[-1][0])
    numbers = [(int.from_bytes(key.hash), demote) for key, demote in left]
    assert numbers == [(3, False), (2, False), (1, False), (0, True)]


def compare(history, policy, *, capacity):
    """Every fact of every snapshot, and the choice where it is one of them."""
    ledger, plain = ledger_for(policy), Plain()

    def check(version):
        seen = ledger.snapshot(version=version)
        assert seen.oldest.key == min(plain.pages, key=lambda page: page.last_used).key
        for sort in ("ended", "shared", "unnamed"):
            page = getattr(seen, sort)
            assert (page and page.key) == plain.oldest(sort)
        found = [(x.state, x.since, x.position, x.expected_ticks, x.page.key) for x in seen.live]
        assert sorted(found, key=str) == plain.live()
        by_version = {}
        for page in sorted(plain.pages, key=lambda page: -page.last_used):
            by_version[page.key.version] = page.key
        by_version.pop(None, None)
        assert {page.key.version: page.key for page in seen.by_version} == by_version
        return ledger.victim(version=version)[0]

    play(history, ledger, plain, check, capacity=capacity)


@given(histories, st.integers(1, 4))
def test_facts_equal_a_search_through_all_pages(history, capacity):
    compare(history, RolloutAware(1), capacity=capacity)


@pytest.mark.parametrize("seed", range(4))
def test_means_equal_a_search_through_all_pages(seed):
    compare(long_history(Random(seed)), RolloutAware(0), capacity=1 + seed % 4)


@pytest.mark.parametrize(("age", "first"), [(7, 1), (8, 0), (9, 0)])
def test_a_page_of_an_ended_rollout_counts_as_eight_times_as_old(age, first):
    """It may be the prompt of the next sample, which least recent use would keep."""
    ledger = ledger_for()
    use(ledger, 0, "live")
    for _ in range(age - 2):
        use(ledger, 9)
    use(ledger, 1, "done")
    ledger.end("done")
    use(ledger, 9)
    ledger.remove(key_of(9))
    key, demote = ledger.victim(version=0)
    assert (key, demote) == (key_of(first), first == 0)


def test_a_rollout_that_waits_for_a_quick_tool_outlives_one_that_waits_for_a_slow_one():
    ledger = ledger_for()
    rollouts = {"quick": (1, 3), "slow": (2, 300)}
    for tool, (number, uses) in 20 * tuple(rollouts.items()):
        use(ledger, number, tool)
        ledger.pause(tool, tool)
        for _ in range(uses):
            use(ledger, 99, "busy")
        use(ledger, number, tool)
    ledger.remove(key_of(99))
    for first, second in (("quick", "slow"), ("slow", "quick")):
        for tool in (first, second):
            use(ledger, rollouts[tool][0], tool)
            ledger.pause(tool, tool)
        assert ledger.victim(version=0)[0] == key_of(2)


def test_the_end_of_the_queue_leaves_first_and_its_head_last():
    ledger = ledger_for()
    for number in range(5):
        use(ledger, number, number)
    for served in range(5):
        use(ledger, 9)  # time passes
        ledger.queue([3, 1, 4, 0, 2][served:])
    ledger.remove(key_of(9))
    ledger.queue([3, 1, 4, 0, 2])
    assert leave(ledger, pages=5) == [key_of(number) for number in (2, 0, 4, 1, 3)]


def test_a_wait_that_lasts_many_times_its_mean_counts_as_lost():
    ledger = ledger_for()
    for _ in range(9):  # a wait of one tick, of two for the slow
        for name, ticks in (("a", 1), ("b", 2)):
            use(ledger, ord(name), name)
            ledger.pause(name, name)
            for _ in range(ticks):
                use(ledger, 99)
            ledger.resume(name)
    ledger.pause("a", "a")
    for _ in range(40):
        use(ledger, 99)
    ledger.pause("b", "b")
    ledger.remove(key_of(99))
    assert leave(ledger) == [key_of(97)]


def test_a_choice_looks_at_lanes_not_at_pages():
    ledger = ledger_for(RolloutAware(1))
    for number in range(5000):
        key = PageKey("", number.to_bytes(2), version=number % 5)
        ledger.touch(key, rollouts=(number % 500,))
    for name in range(500):
        ledger.pause(name, f"tool {name % 9}")
    seen = ledger.snapshot(version=5)
    assert (len(seen.by_version), len(seen.live)) == (5, 9)


def test_rollouts_that_never_end_are_forgotten_without_their_pages(monkeypatch):
    monkeypatch.setattr("primeblocks.kvoffload.evict.ledger._REMEMBERS", 10)
    ledger = ledger_for()
    for name in range(1000):
        use(ledger, name, name)
        ledger.remove(key_of(name))
        ledger.pause(f"other {name}", "tool")
    assert len(ledger._rollouts._all) <= 10


def test_a_rollout_that_has_pages_again_is_not_forgotten(monkeypatch):
    monkeypatch.setattr("primeblocks.kvoffload.evict.ledger._REMEMBERS", 2)
    ledger = ledger_for()
    ledger.pause("a", "tool")
    page = use(ledger, 0, "a")
    for name in range(9):
        ledger.pause(name, "tool")
    ledger.end("a")
    assert ledger.rollouts(page) == ()
    assert ledger.snapshot(version=0).ended.key == page


def test_facts_of_pages_that_a_tier_had_when_it_was_opened():
    ledger = PageLedger(RolloutAware(9), [key_of(number, version=number) for number in range(3)])
    assert [page.key.version for page in ledger.snapshot(version=9).by_version] == [0, 1, 2]
    assert leave(ledger) == [key_of(0, version=0)]
