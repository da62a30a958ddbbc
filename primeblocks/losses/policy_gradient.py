"""Policy-gradient losses: pure functions of log-probabilities.

Each loss returns a *sum* over tokens, and counts. Divide the sums of all ranks and micro-batches by
one global count (`normalisation`). Gradients then do not depend on how the batch was split or
packed.

All losses take `weights`, one per token, which multiply each token's loss. Pass the weights of a
correction or of `normalisation.length_weights`, or a product of several. Gradients flow only to
`trainer_logprobs`. Masked tokens may have any values. A ratio p_trainer / p_rollout counts as at
most e**20, and has no gradient beyond that. If a value of an unmasked token is NaN, the sum is NaN.
All losses raise `ShapeError` if shapes differ (nothing is broadcast), or a dtype is wrong.

In `gspo_loss` and `gmpo_loss`, all tokens of a sequence have the same ratio. The gradient of a
token's loss flows only through the token's own log-ratio. All tokens of a sequence must be on one
rank and in one micro-batch. `sequence_ids` is an integer per token. By default each row of
`[rollouts, tokens]` is one sequence. Rows with several sequences need `sequence_ids`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import UsageError
from .tokens import (
    MAX_LOG_RATIO,
    TokenLoss,
    bounded_ratio,
    check_clips,
    check_tokens,
    finite,
    log_ratios,
    masked,
    sequence_sums,
    total,
)

__all__ = [
    "aipo_loss",
    "cispo_loss",
    "dppo_loss",
    "dro_loss",
    "gmpo_loss",
    "grpo_loss",
    "gspo_loss",
    "sapo_loss",
]


def grpo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    min_ratio: float = 0.0,
    max_ratio: float = math.inf,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """Clipped surrogate of PPO: -min(r A, clip(r, 1 - low, 1 + high) A). Pure. Local.

    r is `p_trainer / p_rollout`, and A is the advantage. If r leaves the band [1 - low, 1 + high]
    in the direction of A, the token gets no gradient. Other losses are settings of `grpo_loss`:

    ==================  ===========================================================================
    GRPO                `weights=length_weights(mask)`, divided by the sequences
    DAPO                `clip_high=0.28`, divided by the tokens; dual clip: `max_ratio=3`
    Dr. GRPO            `group_advantages(normalise=False)`, divided by sequences x longest answer
    M2PO                `clip_low=1, clip_high=math.inf`, weights of `second_moment_mask`
    clip-cov            weights of `clip_cov_mask`
    stable-reinforce    `min_ratio=1e-3, max_ratio=1e3, weights=(advantages.abs() <= 3).float()`
    importance weights  `clip_low=1, clip_high=math.inf`
    ==================  ===========================================================================

    Args:
        rollout_logprobs: the engine's log-probabilities of the sampled tokens. In decoupled PPO,
            pass `log p_old` of the policy at the step's start instead, and pass `weights` that
            correct for `p_old / p_engine`.
        advantages: one per token. Expand the advantage of a rollout to all tokens of the rollout.
        mask: True for completion tokens.
        min_ratio: a lower ratio counts as `min_ratio`, without gradient.
        max_ratio: a higher ratio counts as `max_ratio`, without gradient. For negative advantages,
            `max_ratio` is the dual clip.

    Raises:
        UsageError: a clip is negative, `clip_low` is above 1, or the bounds of r do not include 1.

    Source: arXiv:1707.06347 (PPO), 2402.03300 (GRPO), 2503.14476 (DAPO), 1912.09729 (dual clip).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    log_ratio, advantages = _checked(*operands, mask, weights, sequence_ids)
    check_clips(clip_low, clip_high)
    if not 0 <= min_ratio <= 1 <= max_ratio:
        raise UsageError(f"pass 0 <= min_ratio <= 1 <= max_ratio; got {min_ratio}, {max_ratio}")
    free = bounded_ratio(log_ratio)
    ratio = free.clamp(min_ratio, max_ratio)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    stopped = (gain != free * advantages) | ((log_ratio > MAX_LOG_RATIO) & (advantages != 0))
    return total(-gain, mask=mask, clipped=stopped, weights=weights, sequence_ids=sequence_ids)


def cispo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    clip_low: float = 1.0,
    clip_high: float,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """Policy gradient with a clipped weight: -sg[clip(r, 1 - low, 1 + high)] A log p. Pure. Local.

    In contrast to a clipped surrogate, every token keeps a gradient. If both clips are 0, the
    clipped ratio is 1, so the loss is REINFORCE with `weights`.

    Args:
        clip_low: with `clip_low=1`, small ratios stay unchanged, as in the CISPO paper.

    Raises:
        UsageError: a clip is negative, or `clip_low` is above 1.

    Source: arXiv:2506.13585 (CISPO).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    log_ratio, advantages = _checked(*operands, mask, weights, sequence_ids)
    check_clips(clip_low, clip_high)
    log_ratio = log_ratio.detach()
    ratio = bounded_ratio(log_ratio)
    clipped = (ratio < 1 - clip_low) | (ratio > 1 + clip_high) | (log_ratio > MAX_LOG_RATIO)
    coefficients = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = -coefficients * finite(trainer_logprobs, mask)
    return total(losses, mask=mask, clipped=clipped, weights=weights, sequence_ids=sequence_ids)


def aipo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    max_ratio: float = 2.0,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """Importance-weighted policy gradient: -sg[min(r, max_ratio)] A log p. Pure. Local.

    The loss is CISPO with only an upper bound. Every token keeps a gradient, so the loss suits
    rollouts that are several versions old.

    Args:
        max_ratio: the upper bound of the ratio, at least 1. The AIPO paper uses 2 to 10.

    Raises:
        UsageError: `max_ratio` is below 1.

    Source: arXiv:2505.24034 (AIPO).
    """
    if not max_ratio >= 1:
        raise UsageError(f"max_ratio must be at least 1; got {max_ratio}")
    return cispo_loss(
        trainer_logprobs,
        rollout_logprobs,
        advantages,
        mask=mask,
        clip_low=1.0,
        clip_high=max_ratio - 1,
        weights=weights,
        sequence_ids=sequence_ids,
    )


def sapo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """Soft gate instead of a clip: -(4 / tau) sigmoid(tau (r - 1)) A. Pure. Local.

    tau is `temperature_positive` if A > 0, and `temperature_negative` otherwise. At r = 1 the loss
    has the gradient of REINFORCE. The slope in r is steepest at r = 1. Tokens never count as
    clipped. To normalise as in the SAPO paper, pass `weights=length_weights(mask)` and divide the
    loss by the number of sequences.

    Raises:
        UsageError: a temperature is not above 0.

    Source: arXiv:2511.20347 (SAPO).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    log_ratio, advantages = _checked(*operands, mask, weights, sequence_ids)
    if not (temperature_positive > 0 and temperature_negative > 0):
        raise UsageError(
            f"temperatures must be above 0; got {temperature_positive}, {temperature_negative}"
        )
    ratio = bounded_ratio(log_ratio)
    soft, hard = (torch.full_like(ratio, t) for t in (temperature_positive, temperature_negative))
    tau = torch.where(advantages > 0, soft, hard)
    losses = -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages
    return total(losses, mask=mask, weights=weights, sequence_ids=sequence_ids)


def dppo_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    divergence: Literal["tv", "kl"],
    max_low: float,
    max_high: float,
    max_ratio: float = 20.0,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """Policy gradient in a trust region: -sg[min(r, max_ratio)] A log p, or 0. Pure. Local.

    q is the engine's and p is the trainer's probability of a token. A token's loss is 0 if p moved
    from q in the direction of the advantage, and the divergence is above the bound. The divergence
    between (q, 1 - q) and (p, 1 - p) is |p - q| ("tv") or KL(q || p) ("kl"). Compared with a clip
    of ratios, this loss trains rare tokens longer, and stops training frequent tokens earlier.

    Args:
        max_low: the bound of the divergence if the advantage is not above 0.
        max_high: the bound of the divergence if the advantage is above 0.

    Raises:
        UsageError: a bound is negative, `max_ratio` is below 1, or `divergence` is unknown.

    Source: arXiv:2602.04879 (DPPO, its binary divergences).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    log_ratio, advantages = _checked(*operands, mask, weights, sequence_ids)
    if not (max_low >= 0 and max_high >= 0 and max_ratio >= 1):
        got = f"{max_low}, {max_high}, {max_ratio}"
        raise UsageError(f"pass max_low >= 0, max_high >= 0 and max_ratio >= 1; got {got}")
    if divergence not in ("tv", "kl"):
        raise UsageError(f'divergence must be "tv" or "kl"; got {divergence!r}')
    log_p, log_q = (finite(x, mask) for x in (trainer_logprobs, rollout_logprobs))
    p, q = log_p.detach().exp(), log_q.detach().exp()
    moved = (p - q).abs() if divergence == "tv" else _binary_kl(log_q.detach(), log_p.detach())
    inside = torch.where(
        advantages > 0, (moved <= max_high) | (p <= q), (moved <= max_low) | (p >= q)
    )
    ratio = bounded_ratio(log_ratio.detach()).clamp(max=max_ratio)
    losses = -ratio * advantages * inside * log_p
    return total(losses, mask=mask, clipped=~inside, weights=weights, sequence_ids=sequence_ids)


def dro_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    beta: float,
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """Policy gradient with a penalty: -A log p + beta / 2 (log p - log q)^2. Pure. Local.

    The penalty pulls the probability p of a token back to the engine's probability q, for tokens of
    any age. The loss does not compute a ratio and does not clip.

    Raises:
        UsageError: `beta` is not above 0.

    Source: arXiv:2405.19107 (DRO), per token.
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    log_ratio, advantages = _checked(*operands, mask, weights, sequence_ids)
    if not beta > 0:
        raise UsageError(f"beta must be above 0; got {beta}")
    gain = advantages * finite(trainer_logprobs, mask)
    losses = 0.5 * beta * log_ratio.square() - gain
    return total(losses, mask=mask, weights=weights, sequence_ids=sequence_ids)


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

    The loss is -min(s A, clip(s, 1 - low, 1 + high) A). The value of log s is the mean of the
    sequence's log-ratios. Only the token's own log-ratio has a gradient (GSPO-token). The default
    clips are 500 to 670 times smaller than in `grpo_loss`, because log s is a mean. As in the GSPO
    paper, pass `weights=length_weights(mask, ...)`, and divide the loss by the number of sequences.

    Raises:
        ShapeError: packed tokens have no `sequence_ids`.
        UsageError: a clip is negative, or `clip_low` is above 1.

    Source: arXiv:2507.18071 (GSPO).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    log_ratio, advantages = _checked(*operands, mask, weights, sequence_ids)
    check_clips(clip_low, clip_high)
    ratio, mean = _sequence_ratio(log_ratio, mask, sequence_ids)
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

    c is the token's log-ratio, clipped to at most `clip_high` if A > 0, and to at least `-clip_low`
    otherwise. If a token's ratio moved in the direction of the advantage, the token changes the sum
    of all c by at most the clip. Clipped tokens get no gradient, but the rest of the sequence does.
    As in the GMPO paper, pass `weights=length_weights(mask, ...)`, and divide the loss by the
    number of sequences.

    Raises:
        ShapeError: packed tokens have no `sequence_ids`.
        UsageError: a clip is negative.

    Source: arXiv:2507.20673 (GMPO, geo-mean).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    log_ratio, advantages = _checked(*operands, mask, weights, sequence_ids)
    if not (clip_low >= 0 and clip_high >= 0):
        raise UsageError(f"clips must not be negative; got {clip_low}, {clip_high}")
    bounded = torch.where(
        advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    ratio, _ = _sequence_ratio(bounded, mask, sequence_ids)
    losses, clipped = -ratio * advantages, bounded != log_ratio
    return total(losses, mask=mask, clipped=clipped, weights=weights, sequence_ids=sequence_ids)


def _checked(
    trainer_logprobs: Any,
    rollout_logprobs: Any,
    advantages: Any,
    mask: Any,
    weights: Any,
    sequence_ids: Any,
) -> tuple[Tensor, Tensor]:
    """Return the log-ratios and the advantages, 0 where masked."""
    check_tokens(
        mask,
        sequence_ids=sequence_ids,
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        weights=weights,
    )
    log_ratio = log_ratios(trainer_logprobs, rollout_logprobs, mask)
    return log_ratio, masked(advantages.detach(), mask)


def _binary_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    # KL((q, 1 - q) || (p, 1 - p)). It is infinite if p is 1 and q is not. A term whose
    # probability is 0 counts 0.
    q = log_q.exp()
    rest = (-torch.expm1(log_q)).clamp(min=0)
    rest_logs = torch.log(rest) - torch.log((-torch.expm1(log_p)).clamp(min=0))
    return q * (log_q - log_p) + torch.where(rest > 0, rest * rest_logs, torch.zeros_like(q))


def _sequence_ratio(
    log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return exp of the sequence's mean with the token's own gradient, and the mean."""
    lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
    mean = (sequence_sums(log_ratio, sequence_ids) / lengths).to(log_ratio.dtype)
    return bounded_ratio(mean + (log_ratio - log_ratio.detach())), mean
