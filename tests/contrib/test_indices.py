"""Index sets as values, and their code."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.contrib.index_replay import Indices, compare
from primeblocks.errors import CapacityError, CorruptionError, ShapeError, UsageError


def drawn(seed, lengths, layers, top_k, *, keep, missing=0.0):
    """Sets of documents one after the other; of each a part `keep` is that of the token before."""
    chance = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        before = [np.arange(0)] * layers
        for place in range(length):
            row = np.full((layers, top_k), -1)
            for layer in range(layers):
                size = min(top_k, place + 1)
                held = before[layer][chance.random(len(before[layer])) < keep][:size]
                others = np.setdiff1d(np.arange(place + 1), held)
                more = chance.choice(others, size - len(held), replace=False)
                before[layer] = np.concatenate([held, more])
                row[layer, :size] = before[layer]
            rows.append(row)
    positions = np.concatenate([np.arange(length) for length in lengths]) if lengths else []
    unknown = chance.random((sum(lengths), layers)) < missing
    array = np.array(rows, dtype=np.int64).reshape(-1, layers, top_k)
    return Indices.from_array(
        array, layer_ids=range(3, 3 + layers), positions=np.asarray(positions, int), missing=unknown
    )


@settings(max_examples=settings().max_examples // 3)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(1, 40), max_size=4),
    layers=st.integers(1, 3),
    top_k=st.integers(1, 12),
    keep=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_unpack_after_pack_is_the_identity(seed, lengths, layers, top_k, keep, missing):
    indices = drawn(seed, lengths, layers, top_k, keep=keep, missing=missing)
    assert Indices.unpack(indices.pack()) == indices
    assert Indices.unpack(bytes(indices.pack())) == indices


@settings(max_examples=settings().max_examples // 3)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_a_flipped_byte_is_refused(seed, data):
    payload = bytearray(drawn(seed, [30, 5], 2, 4, keep=0.7, missing=0.1).pack())
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((CorruptionError, ShapeError, ValueError, CapacityError)) as raised:
        Indices.unpack(payload)
    assert "primeblocks" in type(raised.value).__module__
    for cut in (0, 5, len(payload) - 1):
        with pytest.raises(CorruptionError):
            Indices.unpack(payload[:cut])


def test_a_whole_prefix_costs_nothing_and_neighbours_little():
    """1,000 tokens that choose 16 of what they see; a row of int32 would be 64 bytes."""
    whole = drawn(0, [16] * 40, 1, 16, keep=1.0)
    assert len(whole.pack()) < 1000
    sizes = [len(drawn(0, [1000], 1, 16, keep=keep).pack()) / 1000 for keep in (0.0, 0.5, 0.9)]
    independent = sum(math.log2(math.comb(n, 16)) for n in range(17, 1001)) / 8000
    assert independent < sizes[0] < 1.15 * independent
    assert sizes[2] < sizes[1] < sizes[0]
    assert sizes[2] < independent / 2


def test_rows_of_any_order_become_sorted_sets():
    found = Indices.from_array([[[2, 0, -1]], [[1, -1, 0]]], layer_ids=[7], positions=[5, 6])
    assert found.ids.tolist() == [[[0, 2, -1]], [[0, 1, -1]]]
    for said, wrong in [
        ("outside 0..1", [[[2]]]),
        ("twice", [[[1, 1]]]),
        ("outside", [[[-2]]]),
    ]:
        with pytest.raises(UsageError, match=said):
            Indices.from_array(wrong, layer_ids=[0], positions=[1])
    with pytest.raises(ShapeError, match="integer array"):
        Indices.from_array([[[0.5]]], layer_ids=[0])
    with pytest.raises(CapacityError):
        Indices.unpack(drawn(0, [64], 2, 8, keep=1.0).pack(), max_bytes=1000)


def test_slices_joins_and_turns():
    indices = drawn(3, [20, 9], 2, 4, keep=0.5)
    first, second = indices.split([20, 9])
    assert Indices.join([first, second]) == indices
    padded = second.with_missing(after=3)
    assert len(padded) == 12
    assert padded.missing[9:].all()
    assert padded[:9] == second
    part = indices.take([0, 25])
    assert part.positions.tolist() == [0, 5]


def test_agreement_counts_rows_with_a_choice():
    one = Indices.from_array([[[0, -1]], [[0, 1]], [[0, 1]], [[0, 3]], [[1, 2]]], layer_ids=[2])
    other = Indices.from_array([[[0, -1]], [[0, 1]], [[0, 1]], [[0, 2]], [[3, 4]]], layer_ids=[2])
    found = compare(one, other)
    assert found.rows == {2: 3}  # The first two tokens see no more than they select.
    assert found.equal_rows == {2: pytest.approx(1 / 3)}
    assert found.overlap == {2: pytest.approx((1 + 0.5 + 0) / 3)}
    with pytest.raises(ShapeError, match="differ in tokens or layers"):
        compare(one, other[:3])
