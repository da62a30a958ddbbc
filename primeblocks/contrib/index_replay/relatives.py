"""Sets coded as differences: the nearest earlier set, its removed members, and added members.

Neighbouring queries read nearly the same keys, and queries that look for the same thing even more
so. The nearest of the last `WINDOW` sets of a layer is a better guess than the last set alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .interpolative import ranges, set_bits

__all__ = ["WINDOW", "Sets", "apply", "distances_of", "history_of", "tell"]

WINDOW = 64
"""Tokens among which a set finds the one that it is told from."""

_ROWS = 1024  # that look for their relatives together
_SAMPLE = 256  # members of a row that take part in that, about
_TELLING = 10  # bits of a distance and a count, about
_NONE = np.zeros(0, dtype=np.int64)


class Sets(NamedTuple):
    """Sets one after the other: all members, and the number and bound of members per set."""

    members: np.ndarray
    counts: np.ndarray
    sizes: np.ndarray

    @staticmethod
    def join(parts: list[Sets]) -> Sets:
        return Sets(*(np.concatenate([_NONE, *fields]) for fields in zip(*parts, strict=True)))


def history_of(positions: np.ndarray) -> np.ndarray:
    """Return `[tokens]`: how many tokens of a document directly precede each, at most `WINDOW`."""
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(positions))
    return np.minimum(ranges(np.zeros_like(lengths), lengths), WINDOW)


def distances_of(
    ids: np.ndarray, known: np.ndarray, choosing: np.ndarray, history: np.ndarray
) -> np.ndarray:
    """Return for each row of `choosing` how many rows back its nearest relative is, or 0.

    The nearest relative is the earlier row with the fewest different members. For large sets, only
    a sample of the integers is compared.

    Args:
        ids: int32 `[tokens, top_k]` of one layer, followed by -1.
        known: bool `[tokens]`. A row that is not known cannot be a relative.
        choosing: bool `[tokens]`.
        history: `[tokens]`, how many rows back each row may look.
    """
    distance = np.zeros(len(ids), dtype=np.int64)
    for begin in range(0, len(ids), _ROWS):
        end = min(len(ids), begin + _ROWS)
        wanting = choosing[begin:end]
        if not wanting.any():
            continue
        first = max(0, begin - WINDOW)
        bits = _incidence(ids[first:end])
        counts = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
        fewest = np.full(end - begin, np.iinfo(np.int64).max)
        nearest = np.zeros(end - begin, dtype=np.int64)
        for back in range(1, min(WINDOW, end - 1) + 1):
            own = np.arange(max(begin, first + back), end)
            at, other = own - first, own - first - back
            shared = np.bitwise_count(bits[at] & bits[other]).sum(axis=1, dtype=np.int64)
            differing = counts[at] + counts[other] - 2 * shared
            at = own - begin
            better = (differing < fewest[at]) & (back <= history[own]) & known[own - back]
            fewest[at[better]] = differing[better]
            nearest[at[better]] = back
        distance[begin:end] = np.where(wanting, nearest, 0)
    return distance


def _incidence(ids: np.ndarray) -> np.ndarray:
    """Return uint64 `[rows, words]`: one bit per integer of the sample, set if a row has it."""
    thin = (ids.shape[1] // _SAMPLE).bit_length()
    mixed = (ids.astype(np.uint64) * np.uint64(0x9E3779B1)) >> np.uint64(32 - thin)
    row, column = np.nonzero((ids >= 0) & ((mixed & np.uint64((1 << thin) - 1)) == 0))
    integers, place = np.unique(ids[row, column], return_inverse=True)
    has = np.zeros((len(ids), -(-max(1, len(integers)) // 64) * 64), dtype=np.bool_)
    has[row, place] = True
    return np.packbits(has, axis=1).view(np.uint64)


def tell(own: np.ndarray, relative: np.ndarray, size: np.ndarray) -> tuple[Sets, Sets, np.ndarray]:
    """Return ranks of members to remove from `relative`, and of members to add, to get `own`.

    A row that is cheaper on its own is coded from the empty set. The third result is False for such
    a row.

    Args:
        own: int32 `[rows, top_k]`.
        relative: int32 `[rows, top_k]`, all -1 if a row has no relative.
        size: int64 `[rows]`, the bound of the members.
    """
    go, come = _differences(own, relative, size)
    alone, _ = _differences(own, np.full_like(own, -1), size)[::-1]
    told = set_bits(*go) + set_bits(*come) + _TELLING < set_bits(*alone)
    if not told.all():
        go, come = _differences(own, np.where(told[:, None], relative, -1), size)
    return go, come, told


def _differences(own: np.ndarray, relative: np.ndarray, size: np.ndarray) -> tuple[Sets, Sets]:
    row, column = np.nonzero(own >= 0)
    owner, rank = np.nonzero(relative >= 0)
    lengths = np.bincount(owner, minlength=len(own))
    # Keys that ascend along the rows and from row to row, so that one search serves all.
    keys = (row << 32) + own[row, column]
    others = (owner << 32) + relative[owner, rank]
    below = np.searchsorted(others, keys)
    comes = np.append(others, -1)[below] != keys
    goes = np.ones(len(others), dtype=np.bool_)
    goes[below[~comes]] = False
    row, below = row[comes], below[comes]
    among_others = below - (np.cumsum(lengths) - lengths)[row]
    come = (keys[comes] & 0xFFFFFFFF) - among_others
    return (
        Sets(rank[goes], np.bincount(owner[goes], minlength=len(own)), lengths),
        Sets(come, np.bincount(row, minlength=len(own)), size - lengths),
    )


def apply(relative: np.ndarray, go: Sets, come: Sets) -> np.ndarray:
    """Return the sets that `tell` coded, int32 `[rows, top_k]`, ascending and followed by -1."""
    rows, top_k = relative.shape
    wide = np.full((rows, top_k + int(come.counts.max(initial=0))), _LAST, dtype=np.int32)
    wide[:, :top_k] = np.where(relative >= 0, relative, _LAST)
    # Below the j-th member there are as many integers that are not members as it is above j.
    column = np.arange(top_k)
    gaps = np.where(relative >= 0, relative - column, _LAST).astype(np.int64)
    row = np.repeat(np.arange(rows), come.counts)
    keys = (np.arange(rows)[:, None] << 32) + gaps
    below = np.searchsorted(keys.reshape(-1), (row << 32) + come.members, side="right")
    wide[np.repeat(np.arange(rows), go.counts), go.members] = _LAST
    behind = top_k + ranges(np.zeros_like(come.counts), come.counts)
    wide[row, behind] = come.members + below - row * top_k
    wide.sort(axis=1)
    found = wide[:, :top_k]
    return np.where(found == _LAST, -1, found)


_LAST = np.iinfo(np.int32).max
