"""The choice of a victim is pure, and the ledger offers the right candidates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.kvoffload import Candidate, PageKey, VersionAware, lru
from primeblocks.kvoffload.evict import Ledger

versions = st.none() | st.integers(0, 9)
candidates = st.lists(versions, min_size=1, unique=True).flatmap(
    lambda found: st.permutations(range(len(found))).map(
        lambda ticks: [Candidate(v, t) for v, t in zip(found, ticks, strict=True)]
    )
)


@given(candidates, st.integers(0, 9))
def test_lru_takes_the_oldest_use_and_keeps_it(found, version):
    choice = lru(found, version=version)
    assert found[choice.index].last_used == 0
    assert choice.demote


@given(candidates, st.integers(0, 9), st.integers(0, 4))
def test_dead_versions_go_first_oldest_first_and_for_good(found, version, staleness):
    choice = VersionAware(staleness)(found, version=version)
    dead = [c.version for c in found if c.version is not None and version - c.version > staleness]
    if dead:
        assert found[choice.index].version == min(dead)
        assert not choice.demote
    else:
        assert choice == lru(found, version=version)


def test_negative_staleness_is_refused():
    with pytest.raises(PlanError, match="-1"):
        VersionAware(-1)


@given(st.lists(st.tuples(st.booleans(), versions, st.integers(0, 3)), max_size=40))
def test_the_ledger_offers_the_least_recent_page_of_each_version(steps):
    ledger, model = Ledger(), []
    for touch, version, number in steps:
        key = PageKey("", bytes([number]), version=version)
        if key in model:
            model.remove(key)
        if touch:
            ledger.touch(key)
            model.append(key)
        else:
            ledger.remove(key)
    while model:
        offered = []

        def watch(found, *, version, offered=offered):
            offered += found
            return lru(found, version=version)

        victim, _ = ledger.victim(watch, version=0)
        assert victim == model[0]
        assert sorted(map(str, (c.version for c in offered))) == sorted(
            {str(key.version) for key in model}
        )
        ledger.remove(victim)
        model.remove(victim)
