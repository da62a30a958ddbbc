"""Gather rows of tokens from all ranks in the order of the sequence, and sum their gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ....groups import all_gather_rows, reduce_scatter_rows
from ...sequence import SequencePlan, kept_on_plan

__all__ = ["gather_tokens", "scatter_gradients"]


def gather_tokens(
    *tensors: Tensor, sequence: SequencePlan, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Return whole tensors from the parts of all ranks, in the order of the sequence.

    The results have no gradient. The call is collective: one all-gather of all tensors together.
    Each rank receives `(ranks - 1) * max(sequence.counts)` rows. A row contains the values of one
    token from all tensors.

    Args:
        tensors: `[local_tokens, ...]`, of any dtypes.

    Returns:
        One tensor `[tokens, ...]` for each argument, equal on every rank.
    """
    parts = [x.detach().contiguous() for x in tensors]
    if sequence.ranks == 1:
        return tuple(parts)
    flat = [x.reshape(x.shape[0], x.shape[1:].numel()).view(torch.uint8) for x in parts]
    most = max(sequence.counts)
    sent = torch.cat(flat, dim=1)
    arrived = all_gather_rows(sent, rows=most, group=group)
    whole = arrived.index_select(0, _row_of_token(sequence, sent.device))
    found = []
    for x, columns in zip(parts, whole.split([x.shape[1] for x in flat], dim=1), strict=True):
        # A view of another dtype needs rows at an aligned offset. `contiguous` would not copy a
        # single row.
        rows = columns.clone(memory_format=torch.contiguous_format)
        found.append(rows.view(x.dtype).view(sequence.tokens, *x.shape[1:]))
    return tuple(found)


def scatter_gradients(whole: Tensor, *, sequence: SequencePlan, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of a sum over all ranks: the backward of `gather_tokens`.

    Collective: one reduce-scatter of `max(sequence.counts)` rows per rank, in the dtype of `whole`.

    Args:
        whole: `[tokens, ...]`, this rank's share of every token's gradient.

    Returns:
        `[local_tokens, ...]`.
    """
    if sequence.ranks == 1:
        return whole
    most, own = max(sequence.counts), sequence.counts[group.rank()]
    padded = whole.new_zeros(sequence.ranks * most, *whole.shape[1:])
    padded.index_copy_(0, _row_of_token(sequence, whole.device), whole)
    return reduce_scatter_rows(padded, group=group)[:own]


@kept_on_plan
def _row_of_token(sequence: SequencePlan, device: torch.device) -> Tensor:
    """Return `[tokens]`: each token's row if every rank is padded to the largest rank."""
    most = max(sequence.counts)
    rows = torch.empty(sequence.tokens, dtype=torch.int64)
    for rank in range(sequence.ranks):
        places = sequence.indices(rank)
        rows[places] = rank * most + torch.arange(len(places))
    return rows.to(device)
