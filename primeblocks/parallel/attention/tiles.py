"""Lists of the tiles of a hop's attention matrix, made from the plan for FlexAttention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..sequence import SequencePlan, kept_on_plan
from .kernel import Hop, seen_rows

__all__ = ["TileLists", "tile_lists"]


class TileLists(NamedTuple):
    """The tiles of one hop, int32, `[1, 1, rows of tiles, ...]`, and the mask inside of tiles.

    In "full" tiles every query sees every key. In the other tiles some queries see some keys. Each
    row of tiles has a count and its ascending columns, followed by columns that do not count. Each
    column of tiles has the same.

    The mask is two `[queries]`: the first row of keys that a query sees, and the row after the last
    one. If documents fork, the mask is the places and the least depths of queries, then the places,
    the ends and the depths of keys. A query sees a key exactly if `key_place <= place < key_end`
    and the key's depth is at least the query's least depth. Some listed tiles may hold no such
    pair.
    """

    key_counts: Tensor
    key_tiles: Tensor
    full_key_counts: Tensor
    full_key_tiles: Tensor
    query_counts: Tensor
    query_tiles: Tensor
    full_query_counts: Tensor
    full_query_tiles: Tensor
    mask: tuple[Tensor, ...]


def tile_lists(hop: Hop, device: torch.device, tile_tokens: int) -> TileLists:
    """Return the lists of one hop, on the device. Local. Planned once for all hops of a rank.

    The lists live as long as the plan. They take about 16 bytes per tile of the attention matrix of
    this rank's queries, and 8 bytes per query and hop, or 20 bytes if documents fork.
    """
    spec = hop.spec
    every = _of_rank(spec.plan, hop.query_rank, spec.causal, spec.window, tile_tokens, device)
    return every[hop.key_rank]


@kept_on_plan
def _of_rank(
    plan: SequencePlan,
    query_rank: int,
    causal: bool,
    window: int | None,
    tile_tokens: int,
    device: torch.device,
) -> tuple[TileLists, ...]:
    by_rank = []
    for rank in range(plan.ranks):
        if plan.parents is not None:
            by_rank.append(_plan_tree_lists(plan, query_rank, rank, window, tile_tokens))
            continue
        first, last = seen_rows(plan, query_rank, rank, causal, window)
        by_rank.append(_plan_lists(first, last, plan.counts[rank], tile_tokens))
    arrays = [x.ravel() for lists in by_rank for x in lists]
    there = torch.from_numpy(np.concatenate(arrays)).to(device)
    parts, found = iter(there.split([x.size for x in arrays])), []
    for lists in by_rank:
        # Separate tensors: torch compiles anew for a view that begins at another offset.
        moved = [next(parts).view(x.shape).clone() for x in lists]
        found.append(TileLists._make([*moved[:8], tuple(moved[8:])]))
    return tuple(found)


def _plan_lists(
    first: np.ndarray, last: np.ndarray, keys: int, tile_tokens: int
) -> list[np.ndarray]:
    """Return eight lists and the mask, from the rows of keys that each query sees. Pure.

    Each query adds one to the tiles of its interval, by differences along the row of tiles.
    """
    rows, columns = -(-len(first) // tile_tokens), -(-keys // tile_tokens)
    seeing = first < last
    row = np.arange(len(first)) // tile_tokens
    touched, whole = (np.zeros((rows, columns + 1), np.int32) for _ in range(2))
    inside = -(-first // tile_tokens), last // tile_tokens
    for counts, low, high, where in (
        (touched, first // tile_tokens, (last - 1) // tile_tokens + 1, seeing),
        (whole, *inside, inside[0] < inside[1]),
    ):
        np.add.at(counts, (row[where], low[where]), 1)
        np.add.at(counts, (row[where], high[where]), -1)
    full = whole.cumsum(1)[:, :columns] == tile_tokens
    partial = (touched.cumsum(1)[:, :columns] > 0) & ~full
    return [*_all_listed(partial, full), first, last]


def _plan_tree_lists(
    plan: SequencePlan, query_rank: int, key_rank: int, window: int | None, tile_tokens: int
) -> list[np.ndarray]:
    """Return eight lists and the mask if documents fork. Pure.

    A tile's first and last query, and the least and greatest end of its keys, show whether all
    pairs see each other and whether some may.
    """
    depths, ends = plan.ancestry.depths, plan.ancestry.ends
    place, key = (plan.indices(rank).numpy() for rank in (query_rank, key_rank))
    least = np.zeros_like(place) if window is None else depths[place] - window + 1
    key_end, key_depth = ends[key], depths[key]
    (first, last), (lowest, highest) = (_extremes(x, tile_tokens) for x in (place, least))
    (first_key, last_key), (first_end, last_end), (shallow, deep) = (
        _extremes(x, tile_tokens) for x in (key, key_end, key_depth)
    )
    full = (
        (last_key <= first[:, None]) & (last[:, None] < first_end) & (shallow >= highest[:, None])
    )
    # Tiles at the border hold fewer tokens than FlexAttention reads of a full tile.
    full[len(place) // tile_tokens :] = False
    full[:, len(key) // tile_tokens :] = False
    some = (first_key <= last[:, None]) & (first[:, None] < last_end) & (deep >= lowest[:, None])
    more = (place, least, key, key_end, key_depth)
    return [*_all_listed(some & ~full, full), *(x.astype(np.int32) for x in more)]


def _extremes(x: np.ndarray, tile_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.arange(0, len(x), tile_tokens)
    if not len(x):
        return x, x
    return np.minimum.reduceat(x, starts), np.maximum.reduceat(x, starts)


def _all_listed(partial: np.ndarray, full: np.ndarray) -> list[np.ndarray]:
    return [*_listed(partial), *_listed(full), *_listed(partial.T), *_listed(full.T)]


def _listed(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row a count, and its counted columns before the other columns."""
    count = dense.sum(1, dtype=np.int32)
    columns = np.argsort(~dense, axis=1, kind="stable").astype(np.int32)
    return count[None, None], columns[None, None]
