"""Tokens to the ranks that own their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import PlanError, ShapeError
from ..groups import all_to_all_rows

__all__ = [
    "AllToAllDispatcher",
    "Dispatched",
    "GroupedExperts",
    "LocalDispatcher",
    "TokenDispatcher",
    "grouped_swiglu",
    "local_experts",
]


@dataclass(frozen=True)
class Dispatched:
    """What arrived for the local experts.

    Attributes:
        tokens: one row a slot, grouped by local expert. Inside an expert the order is that of the
            one-rank batch: by source rank, then token, then choice.
        counts: rows of each local expert, on the host; they add up to the rows.
        handle: what the dispatcher needs to combine. Its own business.
    """

    tokens: Float[Tensor, "slots hidden"]
    counts: Int64[Tensor, " local_experts"]
    handle: Any


@runtime_checkable
class TokenDispatcher(Protocol):
    """Brings tokens to experts and results back. Each call is the other's backward."""

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        """Send each token to the owners of the experts it chose.

        Args:
            x: `[tokens, hidden]`, differentiable.
            scores: `[tokens, top_k]`, gate weights, differentiable; used by `combine`.
            expert_ids: `[tokens, top_k]`, integers in `[0, num_experts)`.
            num_experts: experts of the whole layer. A rank owns an equal, consecutive share.

        Raises:
            ShapeError: shapes, dtypes or ids do not fit. Raised before any communication.
            PlanError: the experts cannot be shared equally.
        """
        ...

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return `[tokens, hidden]`: each token's expert outputs, weighted by its scores.

        Args:
            y: `[slots, hidden]`, the experts' outputs for `dispatched.tokens`.

        Raises:
            ShapeError: `y` does not have one row for each dispatched row.
        """
        ...


class LocalDispatcher:
    """Every rank owns all experts: rows are sorted, nothing is sent. Local."""

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        _check_slots(x, scores, expert_ids, num_experts)
        by_expert = _sorted_by(expert_ids.flatten())
        tokens = _take(x, by_expert, copies=expert_ids.shape[1])
        counts = torch.bincount(expert_ids.flatten(), minlength=num_experts).cpu()
        return Dispatched(tokens, counts, (scores, by_expert))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        _check_outputs(y, dispatched)
        scores, by_expert = dispatched.handle
        return _weighted_sum(_take(y, by_expert.reverse()), scores)


class AllToAllDispatcher:
    """Experts shared over a process group; rows travel by `all_to_all_single`.

    Works on gloo and NCCL, with ragged and empty ranks. Collective, twice in dispatch (counts,
    rows) and once in combine; their backwards once each. The counts are read on the host once.

    Args:
        group: the ranks that share the experts; rank r owns the r-th share.

    Source: arXiv:2006.16668 (GShard).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        ranks = self.group.size()
        if num_experts % ranks:
            raise PlanError(f"{num_experts} experts cannot be shared equally by {ranks} ranks.")
        _check_slots(x, scores, expert_ids, num_experts)
        flat = expert_ids.flatten()
        # Experts are dealt in order, so sorting by expert also sorts by owner.
        by_expert = _sorted_by(flat)
        mine = torch.bincount(flat, minlength=num_experts).view(ranks, -1)
        ones = [1] * ranks
        theirs = all_to_all_rows(mine, send_counts=ones, receive_counts=ones, group=self.group)
        sent, arriving = torch.stack((mine, theirs)).cpu()
        send, receive = sent.sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all_rows(
            _take(x, by_expert, copies=expert_ids.shape[1]),
            send_counts=send,
            receive_counts=receive,
            group=self.group,
        )
        # What arrived is ordered by (source, expert); the experts want (expert, source).
        local = torch.arange(arriving.shape[1]).repeat(ranks)
        by_source = _sorted_by(local.repeat_interleave(arriving.flatten()).to(x.device))
        handle = _Exchange(scores, by_expert, by_source, send, receive)
        return Dispatched(_take(rows, by_source), arriving.sum(0), handle)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        _check_outputs(y, dispatched)
        handle = dispatched.handle
        rows = all_to_all_rows(
            _take(y, handle.by_source.reverse()),
            send_counts=handle.receive,
            receive_counts=handle.send,
            group=self.group,
        )
        return _weighted_sum(_take(rows, handle.by_expert.reverse()), handle.scores)


def grouped_swiglu(
    tokens: Float[Tensor, "slots hidden"],
    counts: Int64[Tensor, " experts"],
    gate_up: Float[Tensor, "experts gate_and_up hidden"],
    down: Float[Tensor, "experts hidden intermediate"],
    *,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Float[Tensor, "slots hidden"]:
    """Run each expert, `down(activation(gate) * up)`, on its run of rows. Local; differentiable.

    An expert without rows gets a zero gradient, not None: FSDP reduces it like the others.

    Args:
        tokens: grouped by expert, as `Dispatched.tokens`.
        counts: rows of each expert, on the host, adding up to `slots`.
        gate_up: the first half of dim 1 is the gate, the second half is up.

    Raises:
        ShapeError: the counts do not add up to the rows.
    """
    rows = counts.tolist()
    if sum(rows) != tokens.shape[0]:
        raise ShapeError(f"counts add up to {sum(rows)}; tokens has {tokens.shape[0]} rows.")
    out = []
    for x, w_in, w_out in zip(tokens.split(rows), gate_up.unbind(), down.unbind(), strict=True):
        gate, up = F.linear(x, w_in).chunk(2, dim=-1)
        out.append(F.linear(activation(gate) * up, w_out))
    return torch.cat(out)


class GroupedExperts(nn.Module):
    """The experts of one layer, with the parameter names of transformers.

    Built whole; `fully_shard_moe` leaves each rank its share. Collective if the dispatcher is.

    Args:
        dispatcher: must share the experts as the parameters are shared.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        dispatcher: TokenDispatcher,
        activation: Callable[[Tensor], Tensor] = F.silu,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.dispatcher = dispatcher
        self.activation = activation
        gate_up = torch.empty(num_experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        down = torch.empty(num_experts, hidden, intermediate, dtype=dtype, device=device)
        self.gate_up_proj = nn.Parameter(nn.init.normal_(gate_up, std=hidden**-0.5))
        self.down_proj = nn.Parameter(nn.init.normal_(down, std=intermediate**-0.5))

    def forward(self, x: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `[tokens, hidden]`. Arguments as in `TokenDispatcher.dispatch`."""
        sent = self.dispatcher.dispatch(x, scores, expert_ids, num_experts=self.num_experts)
        y = grouped_swiglu(
            sent.tokens,
            sent.counts,
            local_experts(self.gate_up_proj),
            local_experts(self.down_proj),
            activation=self.activation,
        )
        return self.dispatcher.combine(y, sent)


def local_experts(parameter: Tensor) -> Tensor:
    """The experts of this rank: the local part of a DTensor, or the whole tensor. Local."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Order(NamedTuple):
    """A permutation and its inverse."""

    forward: Tensor
    backward: Tensor

    def reverse(self) -> _Order:
        return _Order(self.backward, self.forward)


class _Exchange(NamedTuple):
    scores: Tensor
    by_expert: _Order
    by_source: _Order
    send: list[int]
    receive: list[int]


def _sorted_by(keys: Tensor) -> _Order:
    order = keys.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return _Order(order, inverse)


def _take(x: Tensor, order: _Order, *, copies: int = 1) -> Tensor:
    """Rows of x, each repeated `copies` times, in the given order."""
    return _Take.apply(x, order.forward, order.backward, copies)


class _Take(torch.autograd.Function):
    """A gather both ways: torch's own backward scatters, which is slower and, on a GPU, adds
    repeated rows in no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Tensor, backward: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(backward)
        ctx.shape = (x.shape[0], copies, *x.shape[1:])
        return x.index_select(0, forward if copies == 1 else forward // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (backward,) = ctx.saved_tensors
        return grads[0].index_select(0, backward).view(ctx.shape).sum(1), None, None, None


def _weighted_sum(rows: Tensor, scores: Tensor) -> Tensor:
    per_choice = rows.view(*scores.shape, rows.shape[-1])
    return (per_choice * scores.unsqueeze(-1)).sum(1).to(rows.dtype)


def _check_slots(x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int) -> None:
    if x.ndim != 2 or expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ShapeError(
            f"needs x [tokens, hidden] and expert_ids [tokens, top_k]; "
            f"got {tuple(x.shape)} and {tuple(expert_ids.shape)}."
        )
    if scores.shape != expert_ids.shape:
        raise ShapeError(
            f"scores {tuple(scores.shape)} and expert_ids {tuple(expert_ids.shape)} differ."
        )
    if expert_ids.is_floating_point() or expert_ids.dtype == torch.bool:
        raise ShapeError(f"expert_ids must be integers; got {expert_ids.dtype}.")
    if expert_ids.numel() == 0:
        return
    low, high = (int(end) for end in expert_ids.aminmax())
    if low < 0 or high >= num_experts:
        raise ShapeError(
            f"expert_ids lie in [{low}, {high}]; the layer has experts 0 to {num_experts - 1}."
        )


def _check_outputs(y: Tensor, dispatched: Dispatched) -> None:
    if y.ndim != 2 or y.shape[0] != dispatched.tokens.shape[0]:
        raise ShapeError(
            f"combine needs one row for each of {dispatched.tokens.shape[0]} slots; "
            f"got {tuple(y.shape)}."
        )
