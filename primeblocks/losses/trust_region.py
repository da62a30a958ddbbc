"""Policy-gradient losses that keep to the engine's probabilities without a clip of their ratios."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import UsageError
from .tokens import TokenLoss, bounded_ratio, check_policy, finite, log_ratios, masked, total

__all__ = ["dppo_loss", "dro_loss"]


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
    """Policy gradient within a trust region: -sg[min(r, max_ratio)] A log p, or 0. Pure; local.

    A token counts for nothing if the divergence of (p, 1 - p) from (q, 1 - q) is beyond the bound
    and p has moved in the direction of its advantage. q is the engine's probability, p the
    trainer's; "tv" is |p - q|, "kl" is KL(q || p). Rare tokens, whose ratios are large for small
    moves, are not cut off, and frequent ones are earlier.

    Args:
        max_low: where the advantage is not above 0.
        max_high: where it is.

    Raises:
        ShapeError: as `grpo_loss`.
        UsageError: a bound is negative, `max_ratio` below 1, or `divergence` unknown.

    Source: arXiv:2602.04879 (DPPO, its binary divergences).
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    check_policy(*operands, mask=mask, weights=weights, sequence_ids=sequence_ids)
    if not (max_low >= 0 and max_high >= 0 and max_ratio >= 1):
        got = f"{max_low}, {max_high}, {max_ratio}"
        raise UsageError(f"needs max_low >= 0, max_high >= 0 and max_ratio >= 1; got {got}")
    if divergence not in ("tv", "kl"):
        raise UsageError(f'divergence is "tv" or "kl"; got {divergence!r}')
    log_p, log_q = (finite(x, mask) for x in (trainer_logprobs, rollout_logprobs))
    p, q = log_p.detach().exp(), log_q.detach().exp()
    moved = (p - q).abs() if divergence == "tv" else _binary_kl(log_q.detach(), log_p.detach())
    advantages = masked(advantages.detach(), mask)
    inside = torch.where(
        advantages > 0, (moved <= max_high) | (p <= q), (moved <= max_low) | (p >= q)
    )
    log_ratio = log_ratios(trainer_logprobs, rollout_logprobs, mask).detach()
    ratio = bounded_ratio(log_ratio).clamp(max=max_ratio)
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
    """Policy gradient with a penalty: -A log p + beta / 2 (log p - log q)^2. Pure; local.

    The penalty pulls a token back to the engine's probability q, however old; no ratio is formed
    and none is clipped.

    Raises:
        ShapeError: as `grpo_loss`.
        UsageError: `beta` is not above 0.

    Source: arXiv:2405.19107 (DRO), a token at a time.
    """
    operands = trainer_logprobs, rollout_logprobs, advantages
    check_policy(*operands, mask=mask, weights=weights, sequence_ids=sequence_ids)
    if not beta > 0:
        raise UsageError(f"beta must be above 0; got {beta}")
    log_ratio = log_ratios(trainer_logprobs, rollout_logprobs, mask)
    gain = masked(advantages.detach(), mask) * finite(trainer_logprobs, mask)
    losses = 0.5 * beta * log_ratio.square() - gain
    clipped = torch.zeros_like(mask)
    return total(losses, mask=mask, clipped=clipped, weights=weights, sequence_ids=sequence_ids)


def _binary_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    # KL of (q, 1 - q) from (p, 1 - p); infinite where p is 1 and q is not. A term whose
    # probability is 0 counts 0.
    q = log_q.exp()
    rest = (-torch.expm1(log_q)).clamp(min=0)
    rest_logs = torch.log(rest) - torch.log((-torch.expm1(log_p)).clamp(min=0))
    return q * (log_q - log_p) + torch.where(rest > 0, rest * rest_logs, torch.zeros_like(q))
