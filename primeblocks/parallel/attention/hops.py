"""Attention in hops: a kernel computes each hop while tensors travel, and results are merged.

In hop 0 a rank attends to its own tensors. In hop i it attends to the tensors of the rank i places
before it. The tensors of the next hop arrive during the computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernel import AttentionSpec, accumulator_dtype

__all__ = ["Hops", "attend", "gradient_of_sinks", "merge", "with_sinks"]


class Hops(NamedTuple):
    """One attention call: its rules, its kernel and its ranks.

    Attributes:
        kernel: an `AttentionKernel`, or a kernel of other tensors. Its calls take the staying
            tensors, then the travelling ones, and its backward returns gradients in that order.
            With an `AttentionKernel` q stays, and keys and values travel.
        staying: the number of tensors that stay on their rank. The first of them is q.
        value_dim: the size of the output's last dim.
        group: None if each rank has the keys of all ranks.
    """

    spec: AttentionSpec
    kernel: Any
    staying: int
    value_dim: int
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()


def attend(hops: Hops, sinks: Tensor | None, *tensors: Tensor) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks. Collective. Differentiable.

    While a hop is computed, the tensors of the next hop travel. In backward the gradients of
    travelling tensors travel with them, in the dtype of `accumulator_dtype`.

    Args:
        sinks: `[heads]`, for each head the score of an additional key with a value of zero.
        tensors: first the tensors that stay on their rank, beginning with q,
            `[local_tokens, heads, head_dim]`. Then the travelling tensors, `[local_tokens, ...]`.

    Returns:
        `[local_tokens, heads, value_dim]`.
    """
    return _Attend.apply(hops, sinks, *tensors)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hops: Hops, sinks: Tensor | None, *tensors: Tensor) -> Tensor:
        own, travelling = tensors[: hops.staying], tensors[hops.staying :]
        merged: tuple[Tensor, Tensor] | None = None
        for source, far in _around(travelling, hops):
            hop = hops.spec.hop(hops.rank, source)
            if hop.pairs and own[0].numel():
                merged = merge(merged, *hops.kernel.forward(*own, *far, hop=hop))
        out, lse = _nothing_seen(own[0], hops.value_dim) if merged is None else merged
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(own[0].dtype)
        ctx.save_for_backward(sinks, out, lse, *tensors)
        ctx.hops = hops
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hops: Hops = ctx.hops
        sinks, out, lse, *tensors = ctx.saved_tensors
        own, travelling = tensors[: hops.staying], tensors[hops.staying :]
        grad = grads[0].contiguous()
        of_own: list[Tensor] | None = None
        arriving: _Exchange | None = None
        for source, far in _around(tuple(travelling), hops):
            hop = hops.spec.hop(hops.rank, source)
            found: list[Tensor] = []
            if hop.pairs and own[0].numel():
                found = list(hops.kernel.backward(grad, *own, *far, out, lse, hop=hop))
                of_own = _add(of_own, found[: hops.staying], hops)
            # Meanwhile the gradients that earlier ranks computed for the same rows arrive.
            before = None if arriving is None else list(arriving.wait())
            of_far = _add(before, found[hops.staying :], hops) or _zeros(far)
            arriving = _Exchange(tuple(of_far), source, hops)
        assert arriving is not None
        every = [*(of_own or _zeros(own)), *arriving.wait()]
        of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        cast = (g.to(x.dtype) for g, x in zip(every, tensors, strict=True))
        return None, of_sinks, *cast


def merge(merged: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention to more keys into a result, in the dtype of `accumulator_dtype`.

    The result starts with a rank's own keys. Every query sees one of them, so the `lse` of a result
    is not -inf.

    Source: arXiv:1805.02867 (online softmax).
    """
    if merged is None:
        return out, lse
    before, total = merged
    before = before.to(lse.dtype)
    weight = torch.sigmoid(lse - total).unsqueeze(-1)
    return before.addcmul_(out - before, weight), torch.logaddexp(total, lse)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add one more key per head, whose score is the sink and whose value is zero."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - total).exp().unsqueeze(-1), total


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks, which affect the output only through `lse`."""
    weight = (sinks.to(lse.dtype) - lse).exp()
    delta = (grad.to(lse.dtype) * out).sum(-1)
    return -(weight * delta).sum(0).to(sinks.dtype)


def _nothing_seen(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulator_dtype(q))
    return q.new_zeros(*q.shape[:2], value_dim), lse


def _add(sums: list[Tensor] | None, found: list[Tensor], hops: Hops) -> list[Tensor] | None:
    """Sum gradients, in the dtype of `accumulator_dtype` if there may be more than one hop."""
    if sums is None and hops.group is not None and hops.group.size() > 1:
        return [x.to(accumulator_dtype(x)).contiguous() for x in found] or None
    if sums is None or not found:
        return sums or found or None
    return [total.add_(x) for total, x in zip(sums, found, strict=True)]


def _zeros(tensors: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [x.new_zeros(x.shape, dtype=accumulator_dtype(x)) for x in tensors]


def _around(travelling: tuple[Tensor, ...], hops: Hops) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield the tensors of every rank, this rank's first. Meanwhile the next tensors arrive."""
    ranks = 1 if hops.group is None else hops.group.size()
    held = tuple(x.contiguous() for x in travelling) if ranks > 1 else travelling
    for step in range(ranks):
        source = (hops.rank - step) % ranks
        exchange = _Exchange(held, source, hops) if step + 1 < ranks else None
        yield source, held
        if exchange is not None:
            held = exchange.wait()


class _Exchange:
    """A send of tensors to the next rank, and a receive of the previous rank's tensors."""

    def __init__(self, held: tuple[Tensor, ...], source: int, hops: Hops) -> None:
        group = hops.group
        if group is None or group.size() == 1:
            self._arriving, self._sent, self._work = held, held, []
            return
        rows = hops.spec.plan.counts[(source - 1) % group.size()]
        self._arriving = tuple(x.new_empty((rows, *x.shape[1:])) for x in held)
        self._sent = held  # Keep the tensors alive until they are sent.
        # In the group's order every rank sends to the next one and receives from the previous one.
        after, before = (
            dist.get_global_rank(group, (group.rank() + d) % group.size()) for d in (1, -1)
        )
        operations = [dist.P2POp(dist.isend, x, after, group) for x in held if x.numel()]
        operations += [
            dist.P2POp(dist.irecv, x, before, group) for x in self._arriving if x.numel()
        ]
        self._work = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._work:
            work.wait()
        return self._arriving
