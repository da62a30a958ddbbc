"""Facts of a tier, and the choices made from them."""

import pytest

from primeblocks.errors import PlanError
from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import Facts, RolloutAware, VersionAware, facts_of, lru
from primeblocks.kvoffload.evict.ledger import Ledger


def key_of(number, version=None):
    return PageKey("", number.to_bytes(2), version=version)


def ledger_for(policy=None, **how):
    ledger = Ledger(**how)
    ledger.keep(facts_of(policy or RolloutAware()))
    return ledger


def use(ledger, number, *rollouts, **how):
    ledger.touch(key_of(number), rollouts=rollouts, **how)
    return key_of(number)


def leave(ledger, *, pages=1, policy=None):
    left = []
    for _ in range(pages):
        left.append(ledger.victim(policy or RolloutAware(), version=0)[0])
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
        left.append(ledger.victim(policy, version=5))
        ledger.remove(left[-1][0])
    numbers = [(int.from_bytes(key.hash), demote) for key, demote in left]
    assert numbers == [(3, False), (2, False), (1, False), (0, True)]
