"""Policy-gradient losses: pure functions of log-probabilities.

Each returns a *sum* over tokens with the number of tokens: divide the sum of every rank and
micro-batch by the global count, and gradients do not depend on how the batch was split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import UsageError
from .corrections import check_tokens, importance_weights

__all__ = ["TokenLoss", "aipo_loss", "grpo_loss"]


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """A loss summed over tokens.

    Args:
        sum: differentiable; over the tokens that the mask keeps.
        tokens: how many these are.
        clipped: how many of them had their ratio clipped or truncated.
    """

    sum: Tensor
    tokens: int
    clipped: int


def grpo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """The clipped surrogate of PPO with the engine as the old policy. Pure; local.

    A token stops learning once its ratio has moved beyond `1 - clip_low` or `1 + clip_high` in
    the direction of its advantage; a larger `clip_high` is DAPO's clip-higher.

    Args:
        rollout_logprobs: the engine's, of the tokens that it sampled.
        advantages: one a token, as a rule the same for all of a rollout: expand them.
        mask: True for completion tokens.

    Raises:
        ShapeError: shapes differ (nothing is broadcast); the mask is not bool or another operand
            not floating.
        UsageError: a clip is negative, or `clip_low` is above 1.

    Source: arXiv:2402.03300 (GRPO), arXiv:2503.14476 (DAPO).
    """
    check_tokens(
        mask,
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
    )
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise UsageError(f"needs 0 <= clip_low <= 1 <= 1 + clip_high; got {clip_low}, {clip_high}")
    ratio = _masked(trainer_logprobs - rollout_logprobs, mask).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = _masked(advantages, mask)
    gain = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    clipped = ratio * advantages > clipped_ratio * advantages
    return TokenLoss(-gain.sum(), int(mask.sum()), int(clipped.sum()))


def aipo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    max_ratio: float = 2.0,
) -> TokenLoss:
    """Importance-weighted policy gradient with one-sided truncation. Pure; local.

    Unlike a clipped surrogate every token keeps a gradient, which suits rollouts that are several
    versions old.

    Raises:
        ShapeError: as `grpo_loss`.
        UsageError: `max_ratio` is below 1.

    Source: arXiv:2505.24034 (AIPO).
    """
    check_tokens(
        mask,
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
    )
    log_ratio = _masked(trainer_logprobs - rollout_logprobs, mask).detach()
    weights = importance_weights(log_ratio, torch.zeros_like(log_ratio), max_ratio=max_ratio)
    # Each masked by itself: what padding holds would meet the zero gradient in a product.
    gain = weights * _masked(advantages, mask) * _masked(trainer_logprobs, mask)
    clipped = (log_ratio.exp() > max_ratio) & mask
    return TokenLoss(-gain.sum(), int(mask.sum()), int(clipped.sum()))


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    # Not x * mask: padding may hold inf or NaN.
    return torch.where(mask, x, torch.zeros_like(x))
