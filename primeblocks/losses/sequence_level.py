"""Policy-gradient losses that use the ratio of a whole sequence.

Each token's loss has the ratio of its sequence as its value, and its own share of the gradient. The
loss of the papers is the sum over tokens, each divided by the length of its sequence. For that pass
`weights=length_weights(mask, ...)` and divide by the sequences. All tokens of a sequence must be on
one rank and in one micro-batch, padded (one per row) or packed (`sequence_ids`).
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
    """Clipped surrogate with the geometric mean of a sequence's ratios. Pure. Local.

    -min(s A, clip(s, 1 - low, 1 + high) A). The value of log s is the mean of the sequence's
    log-ratios, and its gradient is the token's own (GSPO-token). Clips are a thousand times smaller
    than GRPO's, because s is a mean.

    Args:
        sequence_ids: an integer per token. By default each row of `[rollouts, tokens]` is one
            sequence. Rows with several sequences need them.

    Raises:
        ShapeError: as for `grpo_loss`, or packed tokens have no `sequence_ids`.
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
    """Geometric mean of ratios that are clipped one by one: -A exp(mean of c). Pure. Local.

    c is the token's log-ratio, at most `clip_high` if A > 0, and at least `-clip_low` otherwise. An
    outlier moves the mean by at most its clip, and its sequence still learns.

    Args:
        sequence_ids: an integer per token. By default each row of `[rollouts, tokens]` is one
            sequence. Rows with several sequences need them.

    Raises:
        ShapeError: as for `grpo_loss`, or packed tokens have no `sequence_ids`.
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
    """Return exp of the sequence's mean with the token's own gradient, and the mean."""
    lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
    mean = (sequence_sums(log_ratio, sequence_ids) / lengths).to(log_ratio.dtype)
    return bounded_ratio(mean + (log_ratio - log_ratio.detach())), mean
