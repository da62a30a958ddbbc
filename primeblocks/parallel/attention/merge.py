"""Softmax attention piece by piece: rectangles of queries and keys, and their results merged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..sequence import SequencePlan
from .kernel import Kernel, accumulator_dtype

__all__ = ["AttentionBackward", "AttentionSpec", "OnlineSoftmax", "packed_attention"]

# Long runs are cut for windowed attention: a mask is as wide as its queries and the window.
_WINDOW_ROWS = 128


class AttentionSpec:
    """Rules of one attention call: the keys that a query sees, and the scale of scores."""

    def __init__(
        self, plan: SequencePlan, *, causal: bool, scale: float, window: int | None
    ) -> None:
        self.plan, self.causal, self.scale, self.window = plan, causal, scale, window

    def rectangles(
        self, query_rank: int, key_rank: int, q: Tensor
    ) -> Iterator[tuple[slice, slice, Kernel]]:
        """Yield each rectangle's rows of queries, its rows of keys, and the kernel for it."""
        if not q.shape[1]:  # More ranks than heads, and kernels do not expect none.
            return
        ranks = {"query_rank": query_rank, "key_rank": key_rank}
        for found in _rectangles(self.plan, **ranks, causal=self.causal, window=self.window):
            mask = None
            if found.kind == "masked":
                assert self.window is not None
                mask = _mask_of(self.plan, found, **ranks, window=self.window)
                mask = None if mask.all() else mask.to(q.device)
            yield found.queries, found.keys, Kernel(found.kind == "causal", mask, self.scale)


class OnlineSoftmax:
    """The attention of some queries, keys arriving in parts.

    Sums are held in float32, or float64 for float64: `out` is normalised by what has been seen,
    `lse` is the logarithm of the sum of exponentials.

    Source: arXiv:1805.02867 (online softmax).
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        dtype = accumulator_dtype(q)
        self.dtype = q.dtype
        self.out = torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take in the attention of `rows` to more keys."""
        before = self.lse[rows]
        total = torch.logaddexp(before, lse)
        # Where nothing was seen yet both are -inf, and so is their sum.
        safe = total.masked_fill(total == -torch.inf, 0.0)
        self.out[rows] *= (before - safe).exp().unsqueeze(-1)
        self.out[rows] += out * (lse - safe).exp().unsqueeze(-1)
        self.lse[rows] = total

    def add_sinks(self, sinks: Tensor) -> None:
        """Take in one more key a head, with this score and a value of zero."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype))
        self.out *= (self.lse - total).exp().unsqueeze(-1)
        self.lse = total

    def result(self) -> Tensor:
        return self.out.to(self.dtype)


class AttentionBackward:
    """The backward of attention, keys arriving in parts again.

    With `out` and `lse` of all keys together, a rectangle's share of the gradients follows from the
    rectangle alone; a sink changes `lse` and nothing else.
    """

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.grad, self.q, self.out, self.lse = grad, q, out, lse
        self.dq = torch.zeros(q.shape, dtype=accumulator_dtype(q), device=q.device)

    def add(self, rows: slice, kernel: Kernel, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of these keys and values; those of the queries are added up."""
        dq, dk, dv = kernel.backward(
            self.grad[rows], self.q[rows], k, v, self.out[rows], self.lse[rows]
        )
        self.dq[rows] += dq
        return dk, dv

    def of_sinks(self, sinks: Tensor) -> Tensor:
        weight = (sinks.to(self.lse.dtype) - self.lse).exp()
        delta = (self.grad * self.out).sum(-1, dtype=self.lse.dtype)
        return -(weight * delta).sum(0).to(sinks.dtype)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, spec: AttentionSpec
) -> Tensor:
    """Attention inside each document of a sequence that one rank holds whole. Local.

    Differentiable.
    """
    return _Packed.apply(q, k, v, sinks, spec)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        merge = OnlineSoftmax(q, v)
        for rows, keys, kernel in spec.rectangles(0, 0, q):
            merge.add(rows, *kernel.forward(q[rows], k[keys], v[keys]))
        if sinks is not None:
            merge.add_sinks(sinks)
        out = merge.result()
        ctx.save_for_backward(q, k, v, sinks, out, merge.lse)
        ctx.spec = spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        gradients = AttentionBackward(grads[0].contiguous(), q, out, lse)
        dk, dv = (torch.zeros(x.shape, dtype=accumulator_dtype(x), device=x.device) for x in (k, v))
        for rows, keys, kernel in ctx.spec.rectangles(0, 0, q):
            more_k, more_v = gradients.add(rows, kernel, k[keys], v[keys])
            dk[keys] += more_k
            dv[keys] += more_v
        of_sinks = None if sinks is None else gradients.of_sinks(sinks)
        return gradients.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None


class _Rectangle(NamedTuple):
    """A rectangle of the attention matrix: rows of the query rank, rows of the key rank.

    `kind` is "full" (every query sees every key), "causal" (a square, query i sees keys up to i)
    or "masked" (`_mask_of` says).
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    kind: str

    @property
    def queries(self) -> slice:
        return slice(self.query_start, self.query_stop)

    @property
    def keys(self) -> slice:
        return slice(self.key_start, self.key_stop)


# The layers of one batch ask alike; the next batch has another plan.
@lru_cache(maxsize=256)
def _rectangles(
    plan: SequencePlan, *, query_rank: int, key_rank: int, causal: bool, window: int | None
) -> tuple[_Rectangle, ...]:
    """The rectangles in which a rank's queries meet another rank's keys. Pure.

    A document's keys lie side by side on each rank, and a run's past keys are a prefix of them,
    so a run of queries needs one rectangle, and a second one where it meets itself.
    """
    places = _places(plan, key_rank)
    starts = np.cumsum([0, *plan.document_lengths])

    def rectangle(start: int, stop: int, offset: int, low: int, high: int, kind: str) -> _Rectangle:
        """Turn places in the sequence into rows."""
        first, last = np.searchsorted(places, [low, high])
        return _Rectangle(offset, offset + stop - start, int(first), int(last), kind)

    found = []
    for start, stop, document, offset in plan.runs(query_rank):
        if window is not None:
            step = max(window, _WINDOW_ROWS)
            for low in range(start, stop, step):
                high, first = min(low + step, stop), max(document, low - window + 1)
                # One rectangle may hold keys before, inside and behind the window.
                found.append(rectangle(low, high, offset + low - start, first, high, "masked"))
        elif causal:
            found.append(rectangle(start, stop, offset, document, start, "full"))
            if key_rank == query_rank:
                found.append(rectangle(start, stop, offset, start, stop, "causal"))
        else:
            end = int(starts[np.searchsorted(starts, document, side="right")])
            found.append(rectangle(start, stop, offset, document, end, "full"))
    return tuple(t for t in found if t.key_stop > t.key_start)


def _mask_of(
    plan: SequencePlan, rectangle: _Rectangle, *, query_rank: int, key_rank: int, window: int
) -> Tensor:
    """`[queries, keys]`, bool: the keys that each query of a masked rectangle sees. Local."""
    queries = torch.from_numpy(_places(plan, query_rank)[rectangle.queries])
    keys = torch.from_numpy(_places(plan, key_rank)[rectangle.keys])
    distance = queries[:, None] - keys
    return (distance >= 0) & (distance < window)


@lru_cache(maxsize=256)
def _places(plan: SequencePlan, rank: int) -> np.ndarray:
    return plan.indices(rank).numpy()
