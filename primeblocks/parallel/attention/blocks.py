"""Lists of the blocks of a hop's attention matrix, as FlexAttention reads them, from the plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import CapacityError
from ..sequence import SequencePlan, kept_on_plan
from .kernel import Hop, seen_rows

__all__ = ["BlockLists", "block_lists"]


class BlockLists(NamedTuple):
    """The blocks of one hop, int32; `[1, 1, rows of blocks, ...]` but for the last two.

    "full" are blocks in which every query sees every key, the others those in which some do; by
    row of blocks how many there are, and their columns, ascending, those without behind. The same
    by column. The last two, `[queries]`, are the rows of keys that a query sees.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor
    first: Tensor
    last: Tensor


def block_lists(hop: Hop, device: torch.device, block: int, limit_bytes: int) -> BlockLists:
    """Return the lists of one hop, on the device. Local; planned once for all hops of a rank.

    They live as long as the plan, at most `limit_bytes` for each query rank, window and `causal`.

    Raises:
        CapacityError: they would take more.
    """
    spec = hop.spec
    need = _bytes(spec.plan, hop.query_rank, block)
    if need > limit_bytes:
        raise CapacityError(
            f"lists of blocks of {block} tokens take {need} bytes for {spec.plan.tokens} tokens on "
            f"{spec.plan.ranks} ranks, over {limit_bytes}. Use FlexKernel(block_tokens={2 * block})"
            " or a larger list_bytes."
        )
    every = _of_rank(spec.plan, hop.query_rank, spec.causal, spec.window, block, device)
    return every[hop.key_rank]


def _bytes(plan: SequencePlan, query_rank: int, block: int) -> int:
    """The size of all lists of one rank's queries."""
    rows = -(-plan.counts[query_rank] // block)
    total = 0
    for keys in plan.counts:
        columns = -(-keys // block)
        sizes = [rows, rows * columns, columns, rows * columns] * 2
        sizes += [plan.counts[query_rank]] * 2
        total += sum(sizes)
    return 4 * total


@kept_on_plan
def _of_rank(
    plan: SequencePlan,
    query_rank: int,
    causal: bool,
    window: int | None,
    block: int,
    device: torch.device,
) -> tuple[BlockLists, ...]:
    """By rank of keys, the lists. One copy to the device brings all."""
    by_rank = []
    for rank in range(plan.ranks):
        first, last = seen_rows(plan, query_rank, rank, causal, window)
        by_rank.append(_plan_lists(first, last, plan.counts[rank], block))
    arrays = [x.ravel() for lists in by_rank for x in lists]
    there = torch.from_numpy(np.concatenate(arrays)).to(device)
    parts = iter(there.split([x.size for x in arrays]))
    return tuple(
        # Tensors of their own: torch compiles anew where a view begins elsewhere.
        BlockLists(*(next(parts).view(x.shape).clone() for x in lists))
        for lists in by_rank
    )


def _plan_lists(first: np.ndarray, last: np.ndarray, keys: int, block: int) -> list[np.ndarray]:
    """Arrays in the order of `BlockLists`, from the rows of keys that each query sees. Pure.

    Each query adds one to the blocks of its interval, by differences along the row of blocks.
    """
    rows, columns = -(-len(first) // block), -(-keys // block)
    seeing = first < last
    row = np.arange(len(first)) // block
    touched, whole = (np.zeros((rows, columns + 1), np.int32) for _ in range(2))
    inside = -(-first // block), last // block
    for counts, low, high, where in (
        (touched, first // block, (last - 1) // block + 1, seeing),
        (whole, *inside, inside[0] < inside[1]),
    ):
        np.add.at(counts, (row[where], low[where]), 1)
        np.add.at(counts, (row[where], high[where]), -1)
    full = whole.cumsum(1)[:, :columns] == block
    partial = (touched.cumsum(1)[:, :columns] > 0) & ~full
    return [*_listed(partial), *_listed(full), *_listed(partial.T), *_listed(full.T), first, last]


def _listed(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By row how many there are, and the columns where they are, the others behind."""
    count = dense.sum(1, dtype=np.int32)
    columns = np.argsort(~dense, axis=1, kind="stable").astype(np.int32)
    return count[None, None], columns[None, None]
