"""Names of a prompt's pages, and the longest prefix that a store has."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError, ShapeError
from primeblocks.kvoffload import PageKey, TieredStore, load_prefix, page_hashes
from tests.kvoffload.conftest import PAGE
from tests.kvoffload.memory_tier import SOON
from tests.kvoffload.store.calls import page_of

pytestmark = pytest.mark.usefixtures("patient")

TOKENS = st.lists(st.integers(0, 3), max_size=24)


@given(one=TOKENS, other=TOKENS, page_tokens=st.integers(1, 5))
def test_hashes_are_equal_as_far_as_whole_pages_are(one, other, page_tokens):
    hashes = page_hashes(one, page_tokens=page_tokens)
    assert len(hashes) == len(one) // page_tokens
    others = page_hashes(other, page_tokens=page_tokens)
    for number, (mine, theirs) in enumerate(zip(hashes, others, strict=False), 1):
        end = number * page_tokens
        assert (mine == theirs) == (one[:end] == other[:end])


def test_a_hash_is_the_one_that_is_written_down():
    """Pages on a disk are found by it: it may not change."""
    first = hashlib.sha256(np.array([7, 8], "<i8").tobytes()).digest()
    second = hashlib.sha256(first + np.array([9, 10], "<i8").tobytes()).digest()
    ids = [7, 8, 9, 10, 11]
    for tokens in (ids, np.array(ids, ">i4"), torch.tensor(ids), np.array(ids, np.uint16)):
        assert page_hashes(tokens, page_tokens=2) == [first, second]
    assert page_hashes([], page_tokens=2) == []


@pytest.mark.parametrize(
    ("tokens", "page_tokens"),
    [
        ([1.0], 1), ([[1], [2]], 1), ([[1], [2, 3]], 1), ([True], 1), (["1"], 1), (3, 1),
        (torch.ones(2, dtype=torch.bfloat16), 1), (torch.ones(2, device="meta"), 1),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(tokens, page_tokens):
    with pytest.raises(PlanError, match="one-dimensional integers"):
        page_hashes(tokens, page_tokens=page_tokens)


@pytest.mark.parametrize("page_tokens", [0, -1, True])
def test_what_is_no_size_of_a_page_is_refused(page_tokens):
    with pytest.raises(PlanError, match="page_tokens must be"):
        page_hashes([1, 2], page_tokens=page_tokens)


def test_an_id_is_not_taken_for_another_one():
    with pytest.raises(PlanError, match="below 2.*63; got 18446744073709551615"):
        page_hashes(np.array([2**64 - 1], np.uint64), page_tokens=1)  # -1 in 64 bits.


def keys_of(prompt):
    return [PageKey("s", each) for each in page_hashes(prompt, page_tokens=2)]


@pytest.mark.parametrize("common", [None, {}])
def test_the_lead_pages_are_loaded(host, memory, common):
    """From host memory and below, also where others write; up to a gap, and to a damaged page."""
    below = memory(8, common=common)
    keys = keys_of(range(10))
    with TieredStore([host(2), below], write="through") as store:
        for number in (0, 1, 2, 4):
            store.save(keys[number], page_of(number)).wait(timeout_s=SOON)
        store.flush().wait(timeout_s=SOON)
        into = np.zeros((5, PAGE), np.uint8)
        found = load_prefix(store, keys, into=list(into), timeout_s=SOON)
        assert [bool(each) for each in found] == [True] * 3
        assert into[:, 0].tolist() == [0, 1, 2, 0, 0], "the page behind the gap is not asked for"
        other = keys_of([0, 1, 2, 9, 9, 9])
        assert len(load_prefix(store, other, into=list(into[:3]), timeout_s=SOON)) == 1
        assert load_prefix(store, [], into=[], timeout_s=SOON) == []
        with pytest.raises(ShapeError):
            load_prefix(store, keys[:1], into=[np.zeros(PAGE + 1, np.uint8)], timeout_s=SOON)


def test_nothing_behind_a_damaged_page_counts(host, memory):
    below, keys = memory(8), keys_of(range(10))
    with TieredStore([host(1), below], write="through") as store:
        for number in range(4):
            store.save(keys[number], page_of(number)).wait(timeout_s=SOON)
        store.flush().wait(timeout_s=SOON)
        below.damage(keys[1])
        into = np.zeros((4, PAGE), np.uint8)
        assert len(load_prefix(store, keys[:4], into=list(into), timeout_s=SOON)) == 1


def test_a_silent_shared_tier_is_not_asked(host, memory):
    keys, common = keys_of(range(10)), {}
    below = memory(8, common=common)
    asked = []
    below.holds = lambda wanted: asked.append(wanted) or [False] * len(wanted)
    with TieredStore([host(4), below]) as store:
        for number in range(3):
            store.save(keys[number], page_of(number)).wait(timeout_s=SOON)
        store._catalogue.levels[0].breaker.silent = lambda: True
        into = np.zeros((5, PAGE), np.uint8)
        assert len(load_prefix(store, keys, into=list(into), timeout_s=SOON)) == 3
        assert not asked
