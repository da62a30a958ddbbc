"""Attention of one rectangle: torch's fused kernel for the device and dtype, or plain matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernel import accumulator_dtype

__all__ = ["FusedRectangle"]


class FusedRectangle:
    """Forward and backward of one rectangle of queries and keys. Local.

    Tensors are `[tokens, heads, head_dim]`; there may be fewer key heads than query heads, and
    values may be narrower or wider than keys.

    Args:
        causal: queries and keys are the same tokens, and each sees those up to itself.
        mask: `[queries, keys]`, bool, what each query sees; None for all.
        scale: of the scores.
    """

    def __init__(self, causal: bool, mask: Tensor | None, scale: float) -> None:
        self.causal, self.mask, self.scale = causal, mask, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the logarithm of the sum of exponentials, `[tokens, heads]`."""
        q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in _same_width(q, k, v))
        if q.device.type == "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_, k_, v_, 0.0, self.causal, attn_mask=self._bias(q), scale=self.scale
            )
        elif self._fits_flash(q):
            groups = q.shape[1] // k.shape[1]
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                q_, *_repeated(k_, v_, groups), 0.0, self.causal, False, scale=self.scale
            )[:2]
        else:
            with torch.autocast(q.device.type, enabled=False):
                out, lse = self._plain(q_, k_, v_)
        lse = lse[0].transpose(0, 1)
        if self.mask is not None:
            # Kernels disagree about the row of a query that sees nothing.
            lse = lse.masked_fill(~self.mask.any(1, keepdim=True), -torch.inf)
        return out[0].transpose(0, 1)[..., : v.shape[2]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, from `out` and `lse` over all keys, these and others."""
        q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in _same_width(q, k, v))
        width = q_.shape[3]
        grad_, out_ = (
            F.pad(x, (0, width - x.shape[2])).transpose(0, 1).unsqueeze(0) for x in (grad, out)
        )
        lse_ = lse.transpose(0, 1).unsqueeze(0).contiguous()
        if q.device.type == "cpu":
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_, q_, k_, v_, out_, lse_, 0.0, self.causal,
                attn_mask=self._bias(q), scale=self.scale,
            )  # fmt: skip
        elif self._fits_flash(q):
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
        return self.mask is None and q.dtype in (torch.bfloat16, torch.float16)

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

    def _probabilities(self, q: Tensor, k: Tensor, groups: int) -> Tensor:
        """Scores in the dtype of sums, -inf where a query does not look."""
        dtype = accumulator_dtype(q)
        scores = q.to(dtype) @ _repeated(k, k, groups)[0].to(dtype).transpose(2, 3) * self.scale
        seen = self.mask
        if self.causal:
            seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        scores = self._probabilities(q, k, groups)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
        return (weights @ _repeated(v, v, groups)[0].to(scores.dtype)).to(q.dtype), lse

    def _plain_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, dtype = q.shape[1] // k.shape[1], accumulator_dtype(q)
        weights = (self._probabilities(q, k, groups) - lse.unsqueeze(-1)).exp()
        all_k, all_v = (x.to(dtype) for x in _repeated(k, v, groups))
        grad, out = grad.to(dtype), out.to(dtype)
        slope = grad @ all_v.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)
        slope = weights * slope * self.scale
        dk, dv = slope.transpose(2, 3) @ q.to(dtype), weights.transpose(2, 3) @ grad
        return slope @ all_k, _summed(dk, groups), _summed(dv, groups)


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad with zeros to one head_dim, a multiple of 8 on a GPU, as fused kernels want it."""
    width = max(q.shape[2], v.shape[2])
    if q.device.type != "cpu":
        width = -(-width // 8) * 8
    return tuple(  # type: ignore[return-value]
        x if x.shape[2] == width else F.pad(x, (0, width - x.shape[2])) for x in (q, k, v)
    )


def _repeated(k: Tensor, v: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Repeat key heads, so that each query head has its own."""
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def _summed(x: Tensor, groups: int) -> Tensor:
    """The backward of `_repeated`."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)
