"""The policies of the comparison, against definitions and against each other."""

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.kvoffload_parts.eviction_engine import Ask, Behind, Ours, Save, play
from benchmarks.kvoffload_parts.eviction_policies import Arc, Belady, LfuDa, Lru, S3Fifo, Sieve
from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import RolloutAware, VersionAware, lru
from tests.kvoffload.evict.papers import ArcPaper, SievePaper

NUMBERS = st.lists(st.integers(0, 9), max_size=120)


def key_of(number):
    return PageKey("", bytes([number]), version=number % 3)


def requests(numbers):
    """One page each; what was requested before is asked for, and all are saved."""
    seen, steps = set(), []
    for number in numbers:
        page = (key_of(number),)
        steps += [Ask(number % 2, page)] if number in seen else []
        steps.append(Save(number % 2, page))
        seen.add(number)
    return Behind(tuple(steps), len(numbers) - len(seen), 0)


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
def test_no_choice_of_victims_has_more_hits_than_belady(numbers, capacity):
    seen = requests(numbers)
    assert play(seen, Belady(capacity, seen)).hits == best(tuple(numbers), capacity)


@given(NUMBERS, st.integers(1, 6))
def test_no_policy_has_more_hits_than_belady(numbers, capacity):
    seen = requests(numbers)
    most = play(seen, Belady(capacity, seen)).hits
    tiers = [tier(capacity) for tier in (Lru, Sieve, S3Fifo, LfuDa, Arc)]
    tiers += [Ours(policy, capacity) for policy in (lru, VersionAware(0), RolloutAware(0))]
    assert max(play(seen, tier).hits for tier in tiers) <= most


@given(NUMBERS, st.integers(1, 6))
def test_lru_hits_what_was_used_among_the_last_pages(numbers, capacity):
    """Outside oracle: the stack distance."""
    hits = 0
    for at, number in enumerate(numbers):
        if number in numbers[:at]:
            last = at - 1 - numbers[:at][::-1].index(number)
            hits += len(set(numbers[last + 1 : at])) < capacity
    seen = requests(numbers)
    assert play(seen, Lru(capacity)).hits == hits == play(seen, Ours(lru, capacity)).hits


@given(NUMBERS, st.integers(1, 6))
def test_rollout_aware_untold_is_lru(numbers, capacity):
    steps = tuple(type(step)(None, step.pages) for step in requests(numbers).steps)
    seen = Behind(steps, 0, 0)
    tier = Ours(RolloutAware(), capacity, names=False)
    assert play(seen, tier).hits == play(seen, Lru(capacity)).hits


@example([1, 1, 0, 1, 0], 1)  # ARC: a page used once leaves a full tier for one that returns
@given(NUMBERS, st.integers(1, 8))
@pytest.mark.parametrize(("tier", "paper"), [(Arc, ArcPaper), (Sieve, SievePaper)])
def test_it_keeps_what_the_paper_keeps(tier, paper, numbers, capacity):
    compare(tier(capacity), paper(capacity), numbers)


def compare(tier, paper, numbers):
    for number in numbers:
        key = key_of(number)
        hit = paper.request(number)
        assert hit == (key in tier)
        if hit:
            tier.load(None, [key])
        else:
            tier.save(None, key)
        assert {number for number in range(64) if key_of(number) in tier} == paper.held()


def test_s3_fifo_keeps_what_is_used_twice_and_what_comes_back():
    tier = S3Fifo(10)
    for number in range(10):
        tier.save(None, key_of(number))
    tier.load(None, [key_of(0), key_of(0)])
    for number in range(10, 20):
        tier.save(None, key_of(number))
    assert key_of(0) in tier
    assert key_of(1) not in tier
    tier.save(None, key_of(3))  # it left a while ago, and is new no more
    assert key_of(3) in tier.main


def test_lfu_da_keeps_what_is_used_often_until_it_is_old():
    tier = LfuDa(2)
    tier.save(None, key_of(0))
    tier.load(None, [key_of(0), key_of(0)])
    kept = []
    for number in range(1, 9):
        tier.save(None, key_of(number))
        kept.append(key_of(0) in tier)
    assert kept == [True, True, True, False, False, False, False, False]
