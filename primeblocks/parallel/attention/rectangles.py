"""Softmax attention rectangle by rectangle: the kernel of a CPU, and the reference of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..sequence import SequencePlan, kept_on_plan
from .fused import FusedRectangle
from .kernel import Hop, accumulator_dtype

__all__ = ["OnlineSoftmax", "RectangleKernel", "rectangles_of"]

# Long runs are cut for windowed attention: a mask is as wide as its queries and the window.
_WINDOW_ROWS = 128


class RectangleKernel:
    """`AttentionKernel` by torch's fused kernels, one call for each run of queries of a hop.

    Runs on every device and in every dtype. Sums of a hop are taken in float32, or float64 for
    float64. With `order="balanced"` a run is a chunk, so a GPU is given many small calls.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, hop: Hop) -> tuple[Tensor, Tensor]:
        q, k, v = _side_by_side(q, k, v)
        merge = OnlineSoftmax(q, v)
        for rows, keys, fused in rectangles_of(hop, q.device):
            merge.add(rows, *fused.forward(q[rows], k[keys], v[keys]))
        return merge.out, merge.lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v = _side_by_side(grad, q, k, v)
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        for rows, keys, fused in rectangles_of(hop, q.device):
            more_q, more_k, more_v = fused.backward(
                grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows]
            )
            dq[rows] += more_q
            dk[keys] += more_k
            dv[keys] += more_v
        return dq, dk, dv


def _side_by_side(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Fused kernels take the numbers of a head to lie side by side, and do not look."""
    return tuple(x if x.stride(2) == 1 else x.contiguous() for x in tensors)


class OnlineSoftmax:
    """The attention of some queries, keys arriving in parts.

    Sums are held in float32, or float64 for float64: `out` is normalised by what has been seen,
    `lse` is the logarithm of the sum of exponentials.

    Source: arXiv:1805.02867 (online softmax).
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        dtype = accumulator_dtype(q)
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


def rectangles_of(hop: Hop, device: torch.device) -> Iterator[tuple[slice, slice, FusedRectangle]]:
    """Yield each rectangle's rows of queries, its rows of keys, and the kernel for it."""
    spec = hop.spec
    seen = None if spec.window is None else hop.seen_rows()
    for found in _rectangles(spec.plan, hop.query_rank, hop.key_rank, spec.causal, spec.window):
        mask = None
        if seen is not None:
            mask = _mask_of(found, *seen)
            mask = None if mask.all() else mask.to(device)
        fused = FusedRectangle(found.kind == "causal", mask, spec.scale, spec.softcap)
        yield found.queries, found.keys, fused


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
@kept_on_plan
def _rectangles(
    plan: SequencePlan, query_rank: int, key_rank: int, causal: bool, window: int | None
) -> tuple[_Rectangle, ...]:
    """The rectangles in which a rank's queries meet another rank's keys. Pure.

    A document's keys lie side by side on each rank, and a run's past keys are a prefix of them,
    so a run of queries needs one rectangle, and a second one where it meets itself.
    """
    places = plan.indices(key_rank).numpy()
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


def _mask_of(rectangle: _Rectangle, first: np.ndarray, last: np.ndarray) -> Tensor:
    """`[queries, keys]`, bool: the keys that each query of a masked rectangle sees. Local."""
    low, high = (torch.from_numpy(x[rectangle.queries, None]) for x in (first, last))
    keys = torch.arange(rectangle.key_start, rectangle.key_stop)
    return (keys >= low) & (keys < high)
