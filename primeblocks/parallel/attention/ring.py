"""Attention over a split sequence by passing keys and values around a ring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...groups import outside_graphs
from ..sequence import SequencePlan
from .inputs import checked
from .kernel import accumulator_dtype
from .merge import AttentionBackward, AttentionSpec, OnlineSoftmax

__all__ = ["ring_attention"]


@outside_graphs
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """Attention inside each document of a sequence that is split over `group`.

    Each rank keeps its queries; keys and values travel from neighbour to neighbour while the
    attention to those at hand is computed. Takes any order of tokens, any mix of documents, ragged
    and empty ranks. Differentiable. Collective: (ranks - 1) x (k, v) bytes are sent and received by
    each rank; the backward sends these again, and their gradients in the dtype of sums, once
    around.

    Args:
        q: `[local_tokens, heads, head_dim]`, rotary embedding applied.
        k: `[local_tokens, key_heads, head_dim]`; key_heads divides heads.
        v: `[local_tokens, key_heads, value_dim]`.
        sequence: the plan of which rank holds which tokens; equal on all ranks.
        causal: a token sees itself and those before it; otherwise its whole document.
        scale: of the scores; default: head_dim ** -0.5.
        window: a token sees itself and the `window - 1` before it; None for all.
        sinks: `[heads]`, the score of one more key a head, whose value is zero.
        check: agree on shapes, dtypes and the plan first, so that a mistake on one rank is an
            error on all and not a wait. One small collective, which a GPU has to wait for.

    Returns:
        `[local_tokens, heads, value_dim]`.

    Raises:
        ShapeError: shapes, dtypes or heads do not fit each other or the plan.
        PlanError: the group does not fit the plan, or ranks hold different plans.
        RankError: another rank refused its arguments.

    Source: arXiv:2310.01889.
    """
    q, k, v, scale = checked(
        "ring_attention", q, k, v, sinks, sequence=sequence, group=group, causal=causal,
        scale=scale, window=window, check=check,
    )  # fmt: skip
    spec = AttentionSpec(sequence, causal=causal, scale=scale, window=window)
    return _Ring.apply(q, k, v, sinks, spec, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        spec: AttentionSpec,
        group: dist.ProcessGroup,
    ) -> Tensor:
        # Fused kernels take the numbers of a head to lie side by side, and do not look.
        q = q if q.stride(2) == 1 else q.contiguous()
        merge = OnlineSoftmax(q, v)
        for source, far_k, far_v in _around(k, v, spec.plan, group):
            for rows, keys, kernel in spec.rectangles(group.rank(), source, q):
                merge.add(rows, *kernel.forward(q[rows], far_k[keys], far_v[keys]))
        if sinks is not None:
            merge.add_sinks(sinks)
        out = merge.result()
        ctx.save_for_backward(q, k, v, sinks, out, merge.lse)
        ctx.spec, ctx.group = spec, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        spec, group = ctx.spec, ctx.group
        gradients = AttentionBackward(grads[0].contiguous(), q, out, lse)
        travelling: _Hop | None = None
        for source, far_k, far_v in _around(k, v, spec.plan, group):
            own = [torch.zeros(x.shape, dtype=accumulator_dtype(x), device=x.device)
                   for x in (far_k, far_v)]  # fmt: skip
            for rows, keys, kernel in spec.rectangles(group.rank(), source, q):
                more_k, more_v = gradients.add(rows, kernel, far_k[keys], far_v[keys])
                own[0][keys] += more_k
                own[1][keys] += more_v
            # What the ranks before this one found for the same keys arrives meanwhile.
            if travelling is not None:
                own = [a + b for a, b in zip(travelling.wait(), own, strict=True)]
            next_rows = spec.plan.counts[(source - 1) % group.size()]
            travelling = _Hop(tuple(own), next_rows, group)
        assert travelling is not None
        dk, dv = travelling.wait()
        of_sinks = None if sinks is None else gradients.of_sinks(sinks)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None


def _around(
    k: Tensor, v: Tensor, plan: SequencePlan, group: dist.ProcessGroup
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield keys and values of every rank, own ones first; the next arrive during the work."""
    ranks = group.size()
    held: tuple[Tensor, ...] = (k.contiguous(), v.contiguous())
    for step in range(ranks):
        source = (group.rank() - step) % ranks
        hop = None
        if step + 1 < ranks:
            hop = _Hop(held, plan.counts[(source - 1) % ranks], group)
        yield source, held[0], held[1]
        if hop is not None:
            held = hop.wait()


class _Hop:
    """Tensors on their way to the next rank, while those of the rank before arrive."""

    def __init__(self, held: tuple[Tensor, ...], rows: int, group: dist.ProcessGroup) -> None:
        ranks, rank = group.size(), group.rank()
        if ranks == 1:
            self._arriving, self._sent, self._work = held, held, []
            return
        self._arriving = tuple(x.new_empty((rows, *x.shape[1:])) for x in held)
        self._sent = held  # Alive until it has left.
        # The group of one rank after the other: every rank sends forward and receives from behind.
        after, before = (dist.get_global_rank(group, (rank + d) % ranks) for d in (1, -1))
        operations = [dist.P2POp(dist.isend, x, after, group) for x in held if x.numel()]
        operations += [
            dist.P2POp(dist.irecv, x, before, group) for x in self._arriving if x.numel()
        ]
        self._work = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._work:
            work.wait()
        return self._arriving
