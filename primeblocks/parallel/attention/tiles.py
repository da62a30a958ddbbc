"""Lists of the tiles of a hop's attention matrix, as FlexAttention reads them, from the plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import CapacityError
from ..sequence import SequencePlan, kept_on_plan
from .kernel import Hop, seen_rows

__all__ = ["TileLists", "check_lists", "tile_lists"]


class TileLists(NamedTuple):
    """The tiles of one hop, int32; `[1, 1, rows of tiles, ...]` but for the last two.

    "full" are tiles in which every query sees every key, the others those in which some do; by
    row of tiles how many there are, and their columns, ascending, those without behind. The same
    by column. The last two, `[queries]`, are the rows of keys that a query sees.
    """

    key_counts: Tensor
    key_tiles: Tensor
    full_key_counts: Tensor
    full_key_tiles: Tensor
    query_counts: Tensor
    query_tiles: Tensor
    full_query_counts: Tensor
    full_query_tiles: Tensor
    first: Tensor
    last: Tensor


def tile_lists(hop: Hop, device: torch.device, tile_tokens: int, limit_bytes: int) -> TileLists:
    """Return the lists of one hop, on the device. Local; planned once for all hops of a rank.

    They live as long as the plan, at most `limit_bytes` for each query rank, window and `causal`.

    Raises:
        CapacityError: those of some rank would take more.
    """
    spec = hop.spec
    check_lists(spec.plan, tile_tokens, limit_bytes)
    every = _of_rank(spec.plan, hop.query_rank, spec.causal, spec.window, tile_tokens, device)
    return every[hop.key_rank]


def check_lists(plan: SequencePlan, tile_tokens: int, limit_bytes: int) -> None:
    """Refuse a plan whose lists of tiles are too large on some rank, on all ranks alike. Local.

    Raises:
        CapacityError: those of the rank with the most tokens take more than `limit_bytes`.
    """
    need = _bytes(plan, tile_tokens)
    if need > limit_bytes:
        raise CapacityError(
            f"lists of tiles of {tile_tokens} tokens take {need} bytes for {plan.tokens} "
            f"tokens on {plan.ranks} ranks, over {limit_bytes}. Use "
            f"FlexKernel(tile_tokens={2 * tile_tokens}) or a larger list_bytes."
        )


def _bytes(plan: SequencePlan, tile_tokens: int) -> int:
    """The size of all lists of the queries of one rank, that with the most."""
    queries = max(plan.counts)
    rows = -(-queries // tile_tokens)
    total = 0
    for keys in plan.counts:
        columns = -(-keys // tile_tokens)
        sizes = [rows, rows * columns, columns, rows * columns] * 2
        sizes += [queries] * 2
        total += sum(sizes)
    return 4 * total


@kept_on_plan
def _of_rank(
    plan: SequencePlan,
    query_rank: int,
    causal: bool,
    window: int | None,
    tile_tokens: int,
    device: torch.device,
) -> tuple[TileLists, ...]:
    """By rank of keys, the lists. One copy to the device brings all."""
    by_rank = []
    for rank in range(plan.ranks):
        first, last = seen_rows(plan, query_rank, rank, causal, window)
        by_rank.append(_plan_lists(first, last, plan.counts[rank], tile_tokens))
    arrays = [x.ravel() for lists in by_rank for x in lists]
    there = torch.from_numpy(np.concatenate(arrays)).to(device)
    parts = iter(there.split([x.size for x in arrays]))
    return tuple(
        # Tensors of their own: torch compiles anew where a view begins elsewhere.
        TileLists(*(next(parts).view(x.shape).clone() for x in lists))
        for lists in by_rank
    )


def _plan_lists(
    first: np.ndarray, last: np.ndarray, keys: int, tile_tokens: int
) -> list[np.ndarray]:
    """Arrays in the order of `TileLists`, from the rows of keys that each query sees. Pure.

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
    return [*_listed(partial), *_listed(full), *_listed(partial.T), *_listed(full.T), first, last]


def _listed(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By row how many there are, and the columns where they are, the others behind."""
    count = dense.sum(1, dtype=np.int32)
    columns = np.argsort(~dense, axis=1, kind="stable").astype(np.int32)
    return count[None, None], columns[None, None]
