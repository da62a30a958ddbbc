"""Policy-gradient losses whose ratio is that of a whole sequence.

Each token's loss has its sequence's ratio as its value, and its own share of the gradient, so that
the sum over tokens, each divided by the length of its sequence, is the loss of the papers: pass
`weights=length_weights(mask, ...)` and divide by the sequences. A sequence lies whole on one rank
and in one micro-batch, padded (one a row) or packed (`sequence_ids`).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import UsageError
from .tokens import (
    MAX_LOG_RATIO,
    TokenLoss,
    bounded_ratio,
    check_clips,
    check_policy,
    log_ratios,
    masked,
    sequence_sums,
    total,
)

__all__ = ["gmpo_loss", "gspo_loss"]


def gspo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """The clipped surrogate with the geometric mean of a sequence's ratios. Pure; local.

    -min(s A, clip(s, 1 - low, 1 + high) A), where log s is the mean of the sequence's log-ratios
    in value, and the token's own in gradient (GSPO-token). Clips are a thousand times smaller
    than GRPO's, for s is a mean.

    Args:
        sequence_ids: an integer a token; one a row of `[rollouts, tokens]` otherwise. Rows that
            hold several sequences need them.

    Raises:
        ShapeError: as `grpo_loss`; packed tokens without `sequence_ids`.
        UsageError: a clip is negative, or `clip_low` is above 1.

    Source: arXiv:2507.18071 (GSPO).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    check_policy(*operands, mask=mask, weights=weights, sequence_ids=sequence_ids)
    check_clips(clip_low, clip_high)
    log_ratio = log_ratios(trainer_logprobs, rollout_logprobs, mask)
    ratio, mean = _sequence_ratio(log_ratio, mask, sequence_ids)
    advantages = masked(advantages.detach(), mask)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    stopped = (gain != ratio * advantages) | ((mean > MAX_LOG_RATIO) & (advantages != 0))
    return total(-gain, mask=mask, clipped=stopped, weights=weights, sequence_ids=sequence_ids)


def gmpo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """The geometric mean of ratios that are clipped one by one: -A exp(mean of c). Pure; local.

    c is the token's log-ratio, at most `clip_high` where A > 0, and at least `-clip_low` where
    not. One outlier moves the mean by its clip at most, and its sequence learns on.

    Args:
        sequence_ids: an integer a token; one a row of `[rollouts, tokens]` otherwise. Rows that
            hold several sequences need them.

    Raises:
        ShapeError: as `grpo_loss`; packed tokens without `sequence_ids`.
        UsageError: a clip is negative.

    Source: arXiv:2507.20673 (GMPO, geo-mean).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    check_policy(*operands, mask=mask, weights=weights, sequence_ids=sequence_ids)
    if not (clip_low >= 0 and clip_high >= 0):
        raise UsageError(f"clips must not be negative; got {clip_low}, {clip_high}")
    log_ratio = log_ratios(trainer_logprobs, rollout_logprobs, mask)
    advantages = masked(advantages.detach(), mask)
    bounded = torch.where(
        advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    ratio, _ = _sequence_ratio(bounded, mask, sequence_ids)
    return total(
        -ratio * advantages,
        mask=mask,
        clipped=bounded != log_ratio,
        weights=weights,
        sequence_ids=sequence_ids,
    )


def _sequence_ratio(
    log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return exp of the sequence's mean, with the token's own gradient, and that mean."""
    lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
    mean = (sequence_sums(log_ratio, sequence_ids) / lengths).to(log_ratio.dtype)
    return bounded_ratio(mean + (log_ratio - log_ratio.detach())), mean
