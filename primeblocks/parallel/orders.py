"""Orders of a split sequence: the pieces of tokens that each rank gets."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from ..errors import PlanError

__all__ = ["costs_before", "merge_pieces", "pieces_in_order"]

ORDERS = ("balanced", "contiguous", "zigzag")


def costs_before(
    positions: np.ndarray, cost: Callable[[np.ndarray], np.ndarray] | None
) -> np.ndarray:
    """Return the summed cost of all tokens before each place. Pure."""
    each = positions + 1.0 if cost is None else np.asarray(cost(positions), dtype=np.float64)
    if each.shape != positions.shape or not np.isfinite(each).all() or (each < 0).any():
        lowest, highest = each.min(initial=0) + 0.0, each.max(initial=0) + 0.0  # -0.0 becomes 0.0.
        raise PlanError(
            f"cost must return one finite number >= 0 for each of {positions.size} positions; "
            f"got shape {each.shape}, from {lowest} to {highest}."
        )
    return np.concatenate([[0.0], np.cumsum(each)])


def pieces_in_order(
    order: str, paid: np.ndarray, ranks: int, chunk_tokens: int
) -> list[list[tuple[int, int]]]:
    """Return the pieces of each rank, from the result of `costs_before`. Pure."""
    tokens = len(paid) - 1
    if order == "balanced":
        return _balanced(paid, tokens, ranks, chunk_tokens)
    if order == "zigzag":
        parts = list(pairwise(tokens * i // (2 * ranks) for i in range(2 * ranks + 1)))
        return [[parts[rank], parts[-1 - rank]] for rank in range(ranks)]
    if order == "contiguous":
        return [[part] for part in pairwise(tokens * i // ranks for i in range(ranks + 1))]
    raise PlanError(f"order must be one of {list(ORDERS)}; got {order!r}.")


def _balanced(
    paid: np.ndarray, tokens: int, ranks: int, chunk_tokens: int
) -> list[list[tuple[int, int]]]:
    chunks = [(a, min(a + chunk_tokens, tokens)) for a in range(0, tokens, chunk_tokens)]
    share = -(-len(chunks) // ranks)
    dearest_first = sorted(chunks, key=lambda chunk: (paid[chunk[0]] - paid[chunk[1]], chunk))
    idle = [(0.0, rank) for rank in range(ranks)]
    heapify(idle)
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in dearest_first:
        load, rank = heappop(idle)
        dealt[rank].append((start, stop))
        if len(dealt[rank]) < share:
            heappush(idle, (load + float(paid[stop] - paid[start]), rank))
    return dealt


def merge_pieces(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sort pieces, drop empty ones and merge neighbours. Pure."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(pieces):
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
