"""Choices of a victim from lanes equal those of a search through all pages."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.kvoffload import PageKey, VersionAware, lru
from primeblocks.kvoffload.evict import Candidate, Snapshot
from primeblocks.kvoffload.ledger import Ledger
from tests.kvoffload.eviction import CAPACITY, Plain, histories, play


def search_lru(plain):
    return min(plain.pages, key=lambda page: page.last_used).key, True


def search_version_aware(plain, *, last_live, patience):
    def filed(page):
        return page.filed

    dead = [p for p in plain.pages if p.version is not None and p.version < last_live]
    if dead:
        return min(dead, key=lambda page: (page.version, page.filed)).key, False
    if ended := [page for page in plain.pages if page.ended]:
        return min(ended, key=filed).key, False
    oldest = min(plain.pages, key=filed)
    alone = [page for page in plain.pages if page.alone]
    if plain.tick - oldest.last_used <= patience and alone:
        closing = [page for page in alone if page.version == last_live]
        return plain.tail(max(closing or alone, key=filed)), True
    return plain.tail(oldest), True


@given(histories)
def test_lru_takes_the_oldest_use_of_all(history):
    ledger, plain = Ledger(capacity_pages=CAPACITY), Plain()
    play(
        history,
        ledger,
        plain,
        lambda version: (ledger.victim(lru, version=version), search_lru(plain)),
    )


@given(histories, st.integers(0, 2), st.sampled_from([0.0, 2.0, 5.0, 99.0]))
def test_version_aware_equals_a_search_through_all_pages(history, staleness, patience):
    ledger, plain = Ledger(capacity_pages=CAPACITY), Plain()

    def evict(snapshot):
        return VersionAware(staleness)(dataclasses.replace(snapshot, patience=patience))

    def victims(version):
        theirs = search_version_aware(plain, last_live=version - staleness, patience=patience)
        return ledger.victim(evict, version=version), theirs

    play(history, ledger, plain, victims)


def page(number, version=None, *, filed, rollouts=None):
    key = PageKey("", bytes([number]), version=version)
    return Candidate(key, last_used=filed, filed=filed, rollouts=rollouts)


def snapshot(*oldest, newest=(), patience=0.0):
    return Snapshot(5, 100, oldest[0], None, 0, 0.0, False, oldest, newest, patience)


DEAD = page(0, 1, filed=9, rollouts={1})
DEADER = page(1, 0, filed=10)
ENDED = page(2, 5, filed=8, rollouts=set())
CLOSING = page(3, 3, filed=7, rollouts={1})
OLD = page(4, 5, filed=1, rollouts={2})
NEW = page(5, 5, filed=99, rollouts={3})


@pytest.mark.parametrize(
    ("seen", "victim", "demote"),
    [
        (snapshot(OLD, DEAD, ENDED, CLOSING, DEADER), DEADER, False),
        (snapshot(OLD, DEAD, ENDED, CLOSING), DEAD, False),
        (snapshot(OLD, ENDED, CLOSING), ENDED, False),
        (snapshot(OLD, CLOSING, newest=[NEW, CLOSING], patience=98), OLD, True),
        (snapshot(OLD, CLOSING, newest=[NEW, CLOSING], patience=99), CLOSING, True),
        (snapshot(OLD, newest=[NEW], patience=98), OLD, True),
        (snapshot(OLD, newest=[NEW], patience=99), NEW, True),
        (snapshot(OLD, newest=[], patience=99), OLD, True),
    ],
)
def test_who_goes_first(seen, victim, demote):
    choice = VersionAware(2)(seen)
    assert (choice.page, choice.demote) == (victim, demote)


def test_negative_staleness_is_refused():
    with pytest.raises(PlanError, match="-1"):
        VersionAware(-1)


def use(ledger, number, rollout, **how):
    key = PageKey("", bytes([number]), version=0)
    ledger.touch(key, rollouts=(rollout,), **how)
    return key


def test_the_last_page_of_a_rollout_leaves_before_those_in_front_of_it():
    ledger = Ledger(capacity_pages=9)
    keys = [use(ledger, number, "a") for number in range(3)]
    use(ledger, 9, "b")
    left = []
    for _ in keys:
        key, _ = ledger.victim(VersionAware(0), version=0)
        ledger.evicted(key)
        left.append(key)
    assert left == keys[::-1]


def test_demoted_pages_go_in_front_of_those_that_were_behind_them():
    ledger = Ledger(capacity_pages=9)
    keys = [use(ledger, number, "a", front=True) for number in range(3)]
    assert ledger.victim(VersionAware(0), version=0)[0] == keys[0]


def test_a_choice_looks_at_lanes_not_at_pages():
    ledger = Ledger(capacity_pages=10_000)
    for number in range(5000):
        key = PageKey("", number.to_bytes(2), version=number % 5)
        ledger.touch(key, rollouts=(number % 50,))
    seen = ledger.snapshot(version=5)
    assert len(seen.oldest) == len(seen.newest) == 5
