from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.replay.sets import SetCode, rows_with_duplicates


def draw_rows(count, num_experts, top_k, seed=0):
    generator = np.random.default_rng(seed)
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    return generator.random((count, num_experts)).argsort(-1)[:, :top_k].astype(dtype)


def all_known(rows):
    return np.zeros(len(rows), dtype=bool)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "bits"),
    [
        (256, 8, 49),
        (128, 8, 41),
        (64, 8, 33),
        (64, 6, 27),
        (32, 4, 16),
        (8, 2, 5),
        (1, 1, 1),
        (16, 16, 28),
        (512, 10, 82),
        (512, 22, 178),
        (1024, 3, 28),
    ],
)
def test_decode_gives_sets_back_in_the_stated_bits(num_experts, top_k, bits):
    code = SetCode(num_experts, top_k)
    assert code.bits == bits
    for count in (0, 1, 7, 8, 33_000):  # 33,000 is more than one piece
        rows = draw_rows(count, num_experts, top_k)
        data = code.encode(rows, skip=all_known(rows))
        assert len(data) == code.nbytes(count)
        np.testing.assert_array_equal(code.decode(data, count), np.sort(rows, axis=-1))


@pytest.mark.parametrize(("num_experts", "top_k"), [(12, 5), (16, 8), (256, 2), (300, 2)])
def test_every_set_has_its_number(num_experts, top_k):
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    # Colexicographic: by the largest id, then by the next.
    every = sorted(combinations(range(num_experts), top_k), key=lambda ids: ids[::-1])
    code = SetCode(num_experts, top_k)
    rows = np.array(every, dtype=dtype)
    whole = code.encode(rows, skip=all_known(rows))
    np.testing.assert_array_equal(code.decode(whole, len(rows)), rows)
    (group,) = code._groups
    numbers = group.numbers(np.ascontiguousarray(rows.T))
    np.testing.assert_array_equal(numbers, np.arange(len(rows)))


@given(st.sampled_from([(256, 8), (512, 4), (97, 7)]), st.integers(1, 2**60))
def test_the_neighbourhood_of_every_binomial_is_decoded(sizes, draw):
    # Where a guess by leading bits could be off by one.
    from math import comb

    num_experts, top_k = sizes
    (group,) = SetCode(num_experts, top_k)._groups
    size = 1 + draw % top_k
    edge = comb(size + draw % (num_experts - size), size)
    numbers = np.array([max(edge + by, 0) for by in (-2, -1, 0, 1, 2)], dtype=np.int64)
    numbers = np.minimum(numbers, comb(num_experts, top_k) - 1)
    ids = np.ascontiguousarray(group.ids(numbers).T)
    np.testing.assert_array_equal(group.numbers(ids), numbers)
    assert (np.diff(ids.astype(int), axis=0) > 0).all()


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_duplicates_are_found(top_k, seed):
    rows = np.random.default_rng(seed).integers(0, 20, (50, top_k)).astype(np.uint8)
    expected = [len(set(row)) < top_k for row in rows.tolist()]
    assert rows_with_duplicates(rows).tolist() == expected
