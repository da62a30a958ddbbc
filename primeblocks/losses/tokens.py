"""Operands with one value a token, their sums over sequences, and a loss with its counts.

Tokens lie in rows that are padded, `[rollouts, tokens]`, or one sequence after another, `[tokens]`.
One row, `[1, tokens]`, may be either: `sequence_ids` say which.
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
    "check_policy",
    "check_tokens",
    "finite",
    "log_ratios",
    "masked",
    "sequence_sums",
    "total",
]

# A ratio counts as e**20 at most. Its sums and squares are finite in float32, and so is what a
# backward multiplies with it: inf * 0 is NaN.
MAX_LOG_RATIO = 20.0
# Of one log-probability, either side of 0: sums and products are then no inf - inf, and no inf * 0.
_MAX_LOG = 1e6


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """A loss summed over tokens.

    Args:
        sum: differentiable, at least float32; over the tokens that the mask keeps.
        tokens: how many these are.
        clipped: how many of them had their ratio clipped or truncated, or did not count for it.
        sequences: how many sequences have such a token; None for tokens without `sequence_ids`,
            and for one row without them, which may be a pack.
    """

    sum: Tensor
    tokens: int
    clipped: int
    sequences: int | None = None


def check_tokens(*masks: Any, sequence_ids: Any = None, **operands: Any) -> None:
    """Refuse operands that are not one value a token: broadcasting would pair the wrong ones. Pure.

    Args:
        masks: bool, at most one, of the same shape.
        sequence_ids: integers of the same shape, or None.
        operands: floating, by their name in messages; one that is None is skipped, unless it is
            the first.

    Raises:
        ShapeError: they differ in shape or device, or one has another dtype.
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
                f"{name} {list(x.shape)} and {first} {list(like.shape)} differ in shape, and"
                " nothing is broadcast. One value a rollout: x[:, None].expand_as(mask)."
            )
        if x.device != like.device:
            raise ShapeError(f"{name} is on {x.device}, {first} on {like.device}")
        if name == "mask" and x.dtype != torch.bool:
            raise ShapeError(f"mask must be bool; got {x.dtype}. Pass mask.bool().")
        if name == "sequence_ids" and (x.is_floating_point() or x.dtype == torch.bool):
            raise ShapeError(f"sequence_ids must be integers; got {x.dtype}")
        if name in operands and not x.is_floating_point():
            raise ShapeError(f"{name} must be floating; got {x.dtype}. Pass {name}.float().")


def check_policy(
    trainer_logprobs: Any,
    rollout_logprobs: Any,
    advantages: Any,
    *,
    mask: Any,
    weights: Any,
    sequence_ids: Any,
) -> None:
    """Refuse operands of a policy-gradient loss that are not one value a token. Pure.

    Raises:
        ShapeError: as `check_tokens`.
    """
    check_tokens(
        mask,
        sequence_ids=sequence_ids,
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        weights=weights,
    )


def check_clips(clip_low: float, clip_high: float) -> None:
    """Refuse a band around 1 that is none.

    Raises:
        UsageError: a clip is negative or NaN, or `clip_low` is above 1.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise UsageError(f"needs 0 <= clip_low <= 1 <= 1 + clip_high; got {clip_low}, {clip_high}")


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x`, at least float32, with zeros where `mask` is False. Local; differentiable."""
    # Not x * mask: padding may hold inf or NaN.
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(mask, x, torch.zeros_like(x))


def finite(x: Tensor, mask: Tensor) -> Tensor:
    """As `masked`, with what is infinite at a million, without gradient. Local; differentiable."""
    return masked(x, mask).clamp(-_MAX_LOG, _MAX_LOG)


def log_ratios(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log of p_trainer / p_rollout, finite, 0 where `mask` is False. Local; differentiable.

    Gradients flow to the trainer's alone. Each is masked by itself: where padding is inf, a
    gradient of 0 would meet it.
    """
    return finite(trainer_logprobs, mask) - finite(rollout_logprobs.detach(), mask)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)`, at most e**20, and without gradient there. Local; differentiable."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def sequence_sums(x: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """The sum over each token's sequence, float64, at every token of it. Local; no gradient.

    Raises:
        ShapeError: the tokens are not in several rows, and have no `sequence_ids`.
    """
    # float64: float32 would lose three digits over 100,000 tokens, by the order of packing.
    x = x.detach().double()
    if sequence_ids is not None:
        sums, index = _packed_sums(x, sequence_ids)
        return sums[index]
    if x.ndim != 2 or len(x) == 1:
        # One row is one rollout or a pack of several, and nothing here tells which.
        raise ShapeError(
            f"sequences of {list(x.shape)} are unknown. Pass sequence_ids, an integer a token"
            " (torch.zeros_like(mask, dtype=torch.int64) if all are one rollout), or several rows,"
            " [rollouts, tokens]."
        )
    return x.sum(dim=1, keepdim=True).expand_as(x)


def _packed_sums(x: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sum for each sequence, and the place of each token's among them."""
    ids, index = torch.unique(sequence_ids, return_inverse=True)
    return x.new_zeros(ids.numel()).index_add(0, index.flatten(), x.flatten()), index


def total(
    losses: Tensor,
    *,
    mask: Tensor,
    clipped: Tensor,
    weights: Tensor | None,
    sequence_ids: Tensor | None,
) -> TokenLoss:
    """Sum losses of tokens, weighted. Local; one read by the host, two with `sequence_ids`.

    Args:
        losses: 0 where `mask` is False.
        weights: no gradient flows to them; a token of weight 0 counts in `tokens` still.
    """
    if weights is not None:
        losses = masked(weights.detach(), mask).to(losses.dtype) * losses
    counts = [mask.sum(), (clipped & mask).sum()]
    if sequence_ids is not None:
        counts.append((_packed_sums(mask.double(), sequence_ids)[0] > 0).sum())
    elif mask.ndim == 2 and len(mask) != 1:
        counts.append(mask.any(dim=1).sum())
    read: list[int] = torch.stack(counts).tolist()
    return TokenLoss(losses.sum(), *read)
