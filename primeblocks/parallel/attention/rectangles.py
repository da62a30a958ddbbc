"""Softmax attention rectangle by rectangle: the default kernel on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..sequence import SequencePlan, kept_on_plan
from .kernel import Hop, accumulator_dtype, chains, rows_before, seen_ranges

__all__ = ["FusedRectangle", "RectangleKernel", "rectangles_of"]

# Rows of keys, as (start, stop).
Ranges = tuple[tuple[int, int], ...]
# With a window, long runs are cut, because a mask spans all its queries and the window.
_WINDOW_ROWS = 128


class RectangleKernel:
    """An `AttentionKernel` that calls torch's fused kernels separately for each run of queries.

    The kernel supports every device, and float16, bfloat16, float32 and float64. Sums of a hop are
    in float32, or in float64 for float64 operands. With `order="balanced"`, runs are about as short
    as a chunk, so the kernel makes many small calls on a GPU.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, hop: Hop) -> tuple[Tensor, Tensor]:
        q, k, v = _side_by_side(q, k, v)
        dtype = accumulator_dtype(q)
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
        for rows, keys, fused in rectangles_of(hop, q.device):
            _see_more_keys(
                out[rows], lse[rows], *fused.forward(q[rows], _taken(k, keys), _taken(v, keys))
            )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v = _side_by_side(grad, q, k, v)
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        for rows, keys, fused in rectangles_of(hop, q.device):
            more_q, more_k, more_v = fused.backward(
                grad[rows], q[rows], _taken(k, keys), _taken(v, keys), out[rows], lse[rows]
            )
            dq[rows] += more_q
            _add(dk, keys, more_k)
            _add(dv, keys, more_v)
        return dq, dk, dv


def _see_more_keys(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Online softmax (arXiv:1805.02867): `out` is normalised over the keys so far."""
    total = torch.logaddexp(lse, more_lse)
    # `total` is -inf if a query has not seen a key yet.
    safe = total.masked_fill(total == -torch.inf, 0.0)
    out *= (lse - safe).exp().unsqueeze(-1)
    out += more_out * (more_lse - safe).exp().unsqueeze(-1)
    lse.copy_(total)


def _taken(x: Tensor, ranges: Ranges) -> Tensor:
    parts = [x[start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _add(total: Tensor, ranges: Ranges, more: Tensor) -> None:
    parts = more.split([stop - start for start, stop in ranges])
    for (start, stop), part in zip(ranges, parts, strict=True):
        total[start:stop] += part


def _side_by_side(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make the numbers of a head contiguous. Fused kernels need this and do not check it."""
    return tuple(x if x.stride(2) == 1 else x.contiguous() for x in tensors)


def rectangles_of(hop: Hop, device: torch.device) -> Iterator[tuple[slice, Ranges, FusedRectangle]]:
    """Yield each rectangle's rows of queries, its ranges of rows of keys, and its kernel."""
    spec, plan = hop.spec, hop.spec.plan
    positions = None
    if spec.window is not None:
        positions = plan.positions(hop.query_rank), plan.positions(hop.key_rank)
    for found in _rectangles(plan, hop.query_rank, hop.key_rank, spec.causal, spec.window):
        mask = None
        if positions is not None and spec.window is not None:
            mask = _mask_of(found, *positions, spec.window)
            mask = None if mask.all() else mask.to(device)
        fused = FusedRectangle(found.kind == "causal", mask, spec.scale, spec.softcap)
        yield found.queries, found.keys, fused


class _Rectangle(NamedTuple):
    """A rectangle of the attention matrix. Keys of several ranges are concatenated.

    `kind` is "full" (every query sees every key), "causal" (a square, query i sees keys up to i)
    or "masked" (see `_mask_of`).
    """

    queries: slice
    keys: Ranges
    kind: str


# Cached for the layers of one batch. The next batch has another plan.
@kept_on_plan
def _rectangles(
    plan: SequencePlan, query_rank: int, key_rank: int, causal: bool, window: int | None
) -> tuple[_Rectangle, ...]:
    """Return the rectangles in which a rank's queries see another rank's keys. Pure.

    The keys before a run of queries are one range of rows, or several if documents fork. A run
    therefore needs one rectangle, and a second one for its own keys.
    """
    found = []
    if not causal:
        for start, stop, document, offset in plan.runs(query_rank):
            places = np.array([document, plan.ancestry.ends[start]])
            first, last = rows_before(plan, key_rank, places).tolist()
            if first < last:
                queries = slice(offset, offset + stop - start)
                found.append(_Rectangle(queries, ((first, last),), "full"))
        return tuple(found)
    for start, stop, offset in chains(plan, query_rank):
        step = stop - start if window is None else max(window, _WINDOW_ROWS)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            queries = slice(offset + low - start, offset + high - start)
            if window is not None:
                # One rectangle may have keys before, inside and after a query's window.
                keys = seen_ranges(plan, key_rank, low, high, window)
                found.append(_Rectangle(queries, tuple(keys), "masked"))
                continue
            keys = seen_ranges(plan, key_rank, low, low, None)
            found.append(_Rectangle(queries, tuple(keys), "full"))
            if key_rank == query_rank:
                found.append(_Rectangle(queries, ((queries.start, queries.stop),), "causal"))
    return tuple(t for t in found if t.keys)


def _mask_of(rectangle: _Rectangle, queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return bool `[queries, keys]`: the keys that each query of a masked rectangle sees. Local."""
    behind = queries[rectangle.queries, None] - _taken(keys, rectangle.keys)
    return (behind >= 0) & (behind < window)


class FusedRectangle:
    """Forward and backward of one rectangle of queries and keys. Local.

    Tensors are `[tokens, heads, head_dim]`. There may be fewer key heads than query heads, and
    values may be narrower or wider than keys.

    Args:
        causal: queries and keys are the same tokens, and each query sees keys up to itself.
        mask: bool `[queries, keys]`, the keys that each query sees. None means all.
    """

    def __init__(
        self, causal: bool, mask: Tensor | None, scale: float, softcap: float | None = None
    ) -> None:
        self.causal, self.mask, self.scale, self.softcap = causal, mask, scale, softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in _same_width(q, k, v))
        if q.device.type == "cpu" and self.softcap is None:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_, k_, v_, 0.0, self.causal, attn_mask=self._bias(q), scale=self.scale
            )
        elif self._fits_flash(q_):
            groups = q.shape[1] // k.shape[1]
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                q_, *_repeated(k_, v_, groups), 0.0, self.causal, False, scale=self.scale
            )[:2]
        else:
            with torch.autocast(q.device.type, enabled=False):
                out, lse = self._plain(q_, k_, v_)
        lse = lse[0].transpose(0, 1)
        if self.mask is not None:
            # Kernels return different values for a query that sees no key.
            lse = lse.masked_fill(~self.mask.any(1, keepdim=True), -torch.inf)
        return out[0].transpose(0, 1)[..., : v.shape[2]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. `out` and `lse` cover all keys of the call."""
        q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in _same_width(q, k, v))
        width = q_.shape[3]
        grad_, out_ = (
            F.pad(x, (0, width - x.shape[2])).transpose(0, 1).unsqueeze(0) for x in (grad, out)
        )
        lse_ = lse.transpose(0, 1).unsqueeze(0).contiguous()
        if q.device.type == "cpu" and self.softcap is None:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_, q_, k_, v_, out_, lse_, 0.0, self.causal,
                attn_mask=self._bias(q), scale=self.scale,
            )  # fmt: skip
        elif self._fits_flash(q_):
            found = self._flash_backward(grad_, q_, k_, v_, out_, lse_)
        else:
            with torch.autocast(q.device.type, enabled=False):
                found = self._plain_backward(grad_, q_, k_, v_, out_, lse_)
        widths = (q.shape[2], k.shape[2], v.shape[2])
        dq, dk, dv = (
            x[0].transpose(0, 1)[..., :width] for x, width in zip(found, widths, strict=True)
        )
        return dq, dk, dv

    def _bias(self, q: Tensor) -> Tensor | None:
        if self.mask is None:
            return None
        zero = torch.zeros(self.mask.shape, dtype=q.dtype, device=q.device)
        return zero.masked_fill(~self.mask, -torch.inf)

    def _fits_flash(self, q: Tensor) -> bool:
        """Whether torch's flash attention takes padded queries."""
        plain = self.mask is None and self.softcap is None and q.shape[3] <= 256
        return plain and q.dtype in (torch.bfloat16, torch.float16)

    def _flash_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # No dropout: not read.
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, *_repeated(k, v, groups), out, lse, None, None, q.shape[2], k.shape[2],
            0.0, self.causal, random, random.new_empty(0), scale=self.scale,
        )  # fmt: skip
        return dq, _summed(dk, groups), _summed(dv, groups)

    def _scores(self, q: Tensor, k: Tensor, groups: int) -> Tensor:
        dtype = accumulator_dtype(q)
        scores = q.to(dtype) @ _repeated(k, k, groups)[0].to(dtype).transpose(2, 3) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        seen = self.mask
        if self.causal:
            seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        scores = self._scores(q, k, groups)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
        return (weights @ _repeated(v, v, groups)[0].to(scores.dtype)).to(q.dtype), lse

    def _plain_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, dtype = q.shape[1] // k.shape[1], accumulator_dtype(q)
        scores = self._scores(q, k, groups)
        weights = (scores - lse.unsqueeze(-1)).exp()
        all_k, all_v = (x.to(dtype) for x in _repeated(k, v, groups))
        grad, out = grad.to(dtype), out.to(dtype)
        slope = grad @ all_v.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)
        slope = weights * slope * self.scale
        if self.softcap is not None:  # The slope of tanh. Unseen keys have weights of 0.
            seen = scores.masked_fill(scores == -torch.inf, 0.0)
            slope = slope * (1 - (seen / self.softcap).square())
        dk, dv = slope.transpose(2, 3) @ q.to(dtype), weights.transpose(2, 3) @ grad
        return slope @ all_k, _summed(dk, groups), _summed(dv, groups)


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad with zeros to one head_dim, a multiple of 8 on a GPU, because fused kernels need this."""
    width = max(q.shape[2], v.shape[2])
    if q.device.type != "cpu":
        width = -(-width // 8) * 8
    return tuple(  # type: ignore[return-value]
        x if x.shape[2] == width else F.pad(x, (0, width - x.shape[2])) for x in (q, k, v)
    )


def _repeated(k: Tensor, v: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def _summed(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)
