"""Collectives that behave alike on gloo and NCCL.

What the backends disagree about is settled here once: float8 travels as bytes, ragged and empty
ranks are normal, and gradients flow. A wait is bounded by the timeout of the process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PlanError, RankError, ShapeError, UsageError

__all__ = ["agree", "all_gather_rows", "all_to_all_rows"]

# What ranks tell each other before an exchange is of one size, whatever they have to say.
_MOST_FACTS, _REASON_BYTES = 16, 400


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


def agree(
    facts: Mapping[str, int],
    *,
    problem: UsageError | None = None,
    group: dist.ProcessGroup,
    device: torch.device | str = "cpu",
) -> None:
    """Raise on every rank if one of them has a problem, or if the facts differ between ranks.

    Called before a larger exchange, it makes one rank's mistake an error on all of them, where
    the others would wait for what never comes. Collective: one gather of half a kilobyte a rank,
    which the host waits for.

    Args:
        facts: up to 16 numbers by name that must be equal on all ranks, such as sizes.
        problem: what this rank would have raised.
        device: where the backend of `group` takes tensors.

    Raises:
        UsageError: `problem` itself, on the rank that has it.
        RankError: another rank has a problem; the message repeats the first one.
        PlanError: a fact differs.
    """
    assert len(facts) <= _MOST_FACTS
    text = "" if problem is None else f"{type(problem).__name__}: {problem}"
    reason = text.encode()[:_REASON_BYTES].ljust(_REASON_BYTES)
    numbers = torch.zeros(1 + _MOST_FACTS, dtype=torch.int64)
    numbers[: 1 + len(facts)] = torch.tensor([problem is not None, *facts.values()])
    mine = torch.cat((numbers.view(torch.uint8), torch.tensor(list(reason), dtype=torch.uint8)))
    mine = mine.to(device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    told = [x.cpu() for x in everyone]
    if problem is not None:
        raise problem
    cut = numbers.numel() * 8
    by_rank = [x[:cut].view(torch.int64).tolist() for x in told]
    for rank, (refused, *_) in enumerate(by_rank):
        if refused:
            words = bytes(told[rank][cut:].tolist()).decode(errors="replace").strip()
            raise RankError(f"rank {rank} of the group refused its arguments: {words}")
    for index, name in enumerate(facts, start=1):
        values = [told_numbers[index] for told_numbers in by_rank]
        if len(set(values)) > 1:
            raise PlanError(f"{name} must be equal on all ranks; by rank it is {values}.")


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
