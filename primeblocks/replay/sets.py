"""Rows of expert ids as sets: compared in any order, and searched for duplicates.

Numpy on pieces that stay in the cache: a sorting network of minima and maxima over columns.
Source: K. E. Batcher, "Sorting networks and their applications" (1968).
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from ..errors import UsageError

__all__ = ["far_apart", "refuse_duplicates", "rows_with_duplicates", "same_sets"]

_PIECE = 1 << 15  # rows


def rows_with_duplicates(rows: np.ndarray) -> np.ndarray:
    """bool `[rows]`: True where `[rows, top_k]` names an id twice. Local."""
    found = np.empty(len(rows), dtype=np.bool_)
    for begin in range(0, len(rows), _PIECE):
        piece = rows[begin : begin + _PIECE]
        found[begin : begin + _PIECE] = _duplicates(_sorted_columns(piece))
    return found


def same_sets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool `[rows]`: True where two `[rows, top_k]` name the same ids, in any order. Local."""
    same = np.empty(len(a), dtype=np.bool_)
    for begin in range(0, len(a), _PIECE):
        piece = slice(begin, begin + _PIECE)
        same[piece] = (_sorted_columns(a[piece]) == _sorted_columns(b[piece])).all(axis=0)
    return same


def _sorted_columns(rows: np.ndarray) -> np.ndarray:
    """`[top_k, rows]`: each row of `[rows, top_k]` in rising order."""
    columns = rows.T.copy()
    low = np.empty_like(columns[:1])[0] if len(columns) else columns
    for a, b in _network(len(columns)):
        np.minimum(columns[a], columns[b], out=low)
        np.maximum(columns[a], columns[b], out=columns[b])
        columns[a] = low
    return columns


def _duplicates(columns: np.ndarray) -> np.ndarray:
    twice = np.zeros(columns.shape[1], dtype=np.bool_)
    for low, high in pairwise(columns):
        twice |= low == high
    return twice


@cache
def _network(width: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort: the pairs to compare, in order."""
    pairs = []
    p = 1
    while p < width:
        k = p
        while k:
            for j in range(k % p, width - k, 2 * k):
                for i in range(min(k, width - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return tuple(pairs)


@lru_cache
def far_apart(num_experts: int) -> np.ndarray:
    """All experts, neighbours far apart: their bits reversed (van der Corput's sequence)."""
    bits = (num_experts - 1).bit_length()
    index = np.arange(1 << bits)
    turned = sum(((index >> bit) & 1) << (bits - 1 - bit) for bit in range(bits)) + 0 * index
    return turned[turned < num_experts]


def refuse_duplicates(array: np.ndarray, missing: np.ndarray) -> None:
    tokens, layers, top_k = array.shape
    twice = rows_with_duplicates(array.reshape(-1, top_k)).reshape(tokens, layers)
    twice &= ~missing[:, None]
    if twice.any():
        token, layer = (int(i) for i in np.argwhere(twice)[0])
        raise UsageError(
            f"{int(twice.sum())} rows name an expert twice, first token {token} of layer position"
            f" {layer}: {array[token, layer].tolist()}. An engine compiled before its capture was"
            " bound returns zeros (run it eagerly); dense layers must be left out."
        )
