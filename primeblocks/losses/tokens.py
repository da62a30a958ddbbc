"""Operands with one value per token, their sums over sequences, and a loss with its counts.

Tokens are stored in padded rows, `[rollouts, tokens]`, or as a pack, `[tokens]`. One row,
`[1, tokens]`, may be either, and only `sequence_ids` show its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError, UsageError

__all__ = [
    "MAX_LOG_RATIO",
    "TokenLoss",
    "bounded_ratio",
    "check_clips",
    "check_tokens",
    "finite",
    "log_ratios",
    "masked",
    "sequence_sums",
    "total",
]

# A ratio counts as at most e**20, so its sums and squares are finite in float32. The factors of a
# backward are finite too, because inf * 0 would be NaN.
MAX_LOG_RATIO = 20.0
# Bounds a log-probability on both sides of 0, so that no sum is inf - inf and no product inf * 0.
_MAX_LOG = 1e6


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """A loss summed over tokens.

    Args:
        sum: the differentiable sum over unmasked tokens, in float32 or a wider dtype.
        tokens: the number of unmasked tokens.
        clipped: the number of unmasked tokens with a clipped or truncated ratio, or with a loss
            that was set to 0.
        sequences: the number of sequences with an unmasked token. Without `sequence_ids`, the
            number is unknown (None) for packed tokens and single rows, which may be packs.
    """

    sum: Tensor
    tokens: int
    clipped: int
    sequences: int | None = None


def check_tokens(*masks: Any, sequence_ids: Any = None, **operands: Any) -> None:
    """Check that operands have one value per token, because broadcasting could mix them up. Pure.

    Args:
        masks: bool, at most one, of the same shape.
        sequence_ids: integers of the same shape, or None.
        operands: floating, by their name in messages. Operands after the first may be None, and are
            skipped then.

    Raises:
        ShapeError: operands differ in shape or device, or an operand has another dtype.
    """
    named = [*operands.items(), *(("mask", mask) for mask in masks)]
    first, like = named[0]
    named = [(name, x) for name, x in named if x is not None or name in (first, "mask")]
    if sequence_ids is not None:
        named.append(("sequence_ids", sequence_ids))
    for name, x in named:
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
        if x.shape != like.shape:
            raise ShapeError(
                f"{name} {list(x.shape)} and {first} {list(like.shape)} differ in shape, and "
                "shapes are not broadcast. For one value per rollout, pass "
                "x[:, None].expand_as(mask), or x.repeat_interleave(lengths) for a pack."
            )
        if x.device != like.device:
            raise ShapeError(f"{name} is on {x.device}, but {first} is on {like.device}")
        if name == "mask" and x.dtype != torch.bool:
            raise ShapeError(f"mask must be bool; got {x.dtype}. Pass mask.bool().")
        if name == "sequence_ids" and (x.is_floating_point() or x.dtype == torch.bool):
            raise ShapeError(f"sequence_ids must be integers; got {x.dtype}")
        if name in operands and not x.is_floating_point():
            raise ShapeError(f"{name} must be floating; got {x.dtype}. Pass {name}.float().")


def check_clips(clip_low: float, clip_high: float) -> None:
    """Check that the clips form a band around 1. Pure.

    Raises:
        UsageError: a clip is negative or NaN, or `clip_low` is above 1.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise UsageError(
            f"clips must have 0 <= clip_low <= 1 and clip_high >= 0; got {clip_low}, {clip_high}"
        )


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x`, at least float32, with zeros where `mask` is False. Local. Differentiable."""
    # x * mask would not remove inf or NaN from padding.
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(mask, x, torch.zeros_like(x))


def finite(x: Tensor, mask: Tensor) -> Tensor:
    """As `masked`, clamped between -1e6 and 1e6, without gradient beyond. Local. Differentiable."""
    return masked(x, mask).clamp(-_MAX_LOG, _MAX_LOG)


def log_ratios(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log of p_trainer / p_rollout, finite, 0 where `mask` is False. Local. Differentiable.

    Gradients flow only to `trainer_logprobs`. Each operand is masked separately: otherwise a
    gradient of 0 would be multiplied with inf in padding.
    """
    return finite(trainer_logprobs, mask) - finite(rollout_logprobs.detach(), mask)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)`, at most e**20, without gradient beyond. Local. Differentiable."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def sequence_sums(x: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """Return at every token the float64 sum over its sequence. Local. Not differentiable.

    Raises:
        ShapeError: the tokens are not in several rows, and have no `sequence_ids`.
    """
    # float64, because float32 loses three digits over 100,000 tokens, depending on the packing.
    x = x.detach().double()
    if sequence_ids is not None:
        sums, index = _packed_sums(x, sequence_ids)
        return sums[index]
    if x.ndim != 2 or len(x) == 1:
        # One row is one rollout or a pack of several. Only sequence_ids can show which.
        raise ShapeError(
            f"tokens of shape {list(x.shape)} do not show which sequence each belongs to. Pass "
            "sequence_ids, one integer per token, or several rows, [rollouts, tokens]. For "
            "tokens of one rollout, pass sequence_ids=torch.zeros_like(mask, dtype=torch.int64)."
        )
    return x.sum(dim=1, keepdim=True).expand_as(x)


def _packed_sums(x: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of each sequence, and the index of each token's sequence."""
    ids, index = torch.unique(sequence_ids, return_inverse=True)
    return x.new_zeros(ids.numel()).index_add(0, index.flatten(), x.flatten()), index


def total(
    losses: Tensor,
    *,
    mask: Tensor,
    clipped: Tensor | None = None,
    weights: Tensor | None,
    sequence_ids: Tensor | None,
) -> TokenLoss:
    """Sum weighted losses of tokens. Local. The host waits once, or twice with `sequence_ids`.

    Args:
        losses: 0 where `mask` is False.
        weights: without gradient. A token of weight 0 still counts in `tokens`.
    """
    if weights is not None:
        losses = masked(weights.detach(), mask).to(losses.dtype) * losses
    counts = [mask.sum(), mask.new_zeros(()) if clipped is None else (clipped & mask).sum()]
    if sequence_ids is not None:
        counts.append((_packed_sums(mask.double(), sequence_ids)[0] > 0).sum())
    elif mask.ndim == 2 and len(mask) != 1:
        counts.append(mask.any(dim=1).sum())
    read: list[int] = torch.stack(counts).tolist()
    return TokenLoss(losses.sum(), *read)
