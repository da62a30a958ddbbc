"""Collectives that behave alike on gloo and NCCL.

What the backends disagree about is settled here once: float8 travels as bytes, ragged and empty
ranks are normal, and gradients flow. A wait is bounded by the timeout of the process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ShapeError

__all__ = ["all_gather_rows", "all_to_all_rows"]


def all_to_all_rows(
    x: Tensor,
    *,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Send consecutive runs of rows to each rank; return what arrived, ordered by sender.

    Any dtype; zero rows are fine. Differentiable: gradients return the way the rows came.
    Collective, and so is its backward: either all ranks run it or none does.

    Args:
        x: `[rows, ...]`; the trailing dims are equal on all ranks.
        send_counts: rows for each rank of `group`, adding up to `rows`.
        receive_counts: rows from each rank, which is what that rank sends here.

    Raises:
        ShapeError: the counts do not fit the group or `x`. Raised before anything is sent.
    """
    send, receive = list(send_counts), list(receive_counts)
    size = group.size()
    if len(send) != size or len(receive) != size:
        raise ShapeError(
            f"a group of {size} ranks needs {size} counts each way; "
            f"got {len(send)} to send and {len(receive)} to receive."
        )
    if min(*send, *receive) < 0 or sum(send) != x.shape[0]:
        raise ShapeError(f"send_counts {send} must add up to the {x.shape[0]} rows of x.")
    return _AllToAllRows.apply(x, send, receive, group)


def all_gather_rows(x: Tensor, *, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the rows of every rank, by rank. Ranks may hold different numbers of rows, or none.

    Any dtype. Not differentiable. Two collectives; each rank receives the longest rank's rows
    once per rank.

    Args:
        x: `[rows, ...]`; dtype and trailing dims are equal on all ranks.
    """
    lengths = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(group.size())]
    dist.all_gather(lengths, lengths[0].new_tensor([x.shape[0]]), group=group)
    rows = [int(length) for length in lengths]
    # Equal shapes on all ranks: not every backend gathers ragged lists.
    padded = x.new_zeros((max(rows), *x.shape[1:]))
    padded[: x.shape[0]] = x.detach()
    gathered = [torch.empty_like(padded) for _ in rows]
    dist.all_gather([_bytes(part) for part in gathered], _bytes(padded), group=group)
    return [part[:length] for part, length in zip(gathered, rows, strict=True)]


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back = (receive, send, group)
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(_bytes(out), _bytes(x.contiguous()), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _AllToAllRows.apply(grads[0], *ctx.way_back), None, None, None


def _bytes(x: Tensor) -> Tensor:
    # gloo refuses float8 in collectives. An element is one byte, so counts stay true.
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x
