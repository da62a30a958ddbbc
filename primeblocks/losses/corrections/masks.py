"""Weights of 0 and 1, which remove tokens and sequences that are too far off policy."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import UsageError
from ..tokens import bounded_ratio, check_clips, check_tokens, log_ratios, masked, sequence_sums
from .weights import Correction, only

__all__ = [
    "advantage_mask",
    "clip_cov_mask",
    "entropy_scaled_mask",
    "kl_cov_tokens",
    "second_moment_mask",
    "sequence_outlier_mask",
]


@torch.no_grad()
def sequence_outlier_mask(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    statistic: Literal["error", "k1", "k2", "k3"],
    bound: float,
    over: Literal["mean", "max"] = "mean",
    advantages: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> Correction:
    """Weight 0 for sequences in which engine and trainer disagree, 1 for others. Pure. Local.

    With x = log r a token's statistic is exp(abs(x)) ("error"), -x ("k1"), x^2 / 2 ("k2") or
    exp(x) - 1 - x ("k3"). A sequence is an outlier if its mean or maximum is above `bound`.

    Args:
        bound: above 1 for "error". For the others, a KL divergence per token.
        advantages: with them, only sequences with a negative sum of advantages are masked
            (DeepSeek-V3.2's off-policy mask, with "k1").

    Raises:
        ShapeError: as for `importance_weights`.
        UsageError: `statistic` or `over` is unknown, or `bound` is NaN.

    Source: arXiv:2512.23075 (maximum of k3), 2512.02556 (DeepSeek-V3.2); NeMo-RL's
        seq_logprob_error_threshold is the mean of "error".
    """
    check_tokens(
        mask,
        sequence_ids=sequence_ids,
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
    )
    if math.isnan(bound) or over not in ("mean", "max"):
        raise UsageError(f'over is "mean" or "max", and bound a number; got {over!r}, {bound}')
    x = log_ratios(trainer_logprobs, rollout_logprobs, mask)
    by_name = {
        "error": lambda: bounded_ratio(x.abs()),
        "k1": lambda: -x,
        "k2": lambda: 0.5 * x.square(),
        "k3": lambda: bounded_ratio(x) - 1 - x,
    }
    if statistic not in by_name:
        raise UsageError(f"statistic is one of {', '.join(by_name)}; got {statistic!r}")
    values = masked(by_name[statistic](), mask)
    lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
    if over == "mean":
        outliers = sequence_sums(values, sequence_ids) / lengths > bound
    else:
        outliers = sequence_sums((values > bound) & mask, sequence_ids) > 0
    if advantages is not None:
        outliers &= sequence_sums(masked(advantages, mask), sequence_ids) < 0
    return only(~outliers, mask, lengths=lengths, like=x)


@torch.no_grad()
def entropy_scaled_mask(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    entropies: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    max_score: float,
    epsilon: float,
) -> Correction:
    """Weight 1 where (log r)^2 / (entropy + epsilon) <= max_score, or 0. Pure. Local.

    Log-ratios of tokens of which the engine was unsure are larger by nature, and mean exploration.
    If the engine was sure, the same log-ratio is noise. Tune both bounds for your engine.

    Args:
        entropies: of the engine's distribution at each token, in nats, not negative.

    Raises:
        ShapeError: as for `importance_weights`.
        UsageError: `max_score` is below 0, or `epsilon` is not above 0.

    Source: arXiv:2607.22186 (ESTR).
    """
    check_tokens(
        mask,
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=rollout_logprobs,
        entropies=entropies,
    )
    if not (max_score >= 0 and epsilon > 0):
        raise UsageError(f"needs max_score >= 0 and epsilon > 0; got {max_score}, {epsilon}")
    x = log_ratios(trainer_logprobs, rollout_logprobs, mask)
    score = x.square() / (masked(entropies, mask) + epsilon)
    return only(score <= max_score, mask, lengths=None, like=x)


@torch.no_grad()
def second_moment_mask(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    max_moment: float = 0.04,
) -> Correction:
    """Weight 0 for the largest log-ratios, until the mean square of the rest is small. Pure. Local.

    The mean is over the batch: call it once for all tokens of a step, before they are split into
    micro-batches. Among equal log-ratios at the bound, the first ones are kept.

    Args:
        max_moment: the largest mean of (log r)^2 over the tokens that keep weight 1.

    Raises:
        ShapeError: as for `importance_weights`.
        UsageError: `max_moment` is below 0.

    Source: arXiv:2510.01161 (M2PO).
    """
    check_tokens(mask, trainer_logprobs=trainer_logprobs, rollout_logprobs=rollout_logprobs)
    if not max_moment >= 0:
        raise UsageError(f"max_moment must not be below 0; got {max_moment}")
    x = log_ratios(trainer_logprobs, rollout_logprobs, mask)
    squares, order = x.double().square()[mask].sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, squares.numel() + 1, device=x.device)
    inside = torch.zeros_like(mask)
    chosen = torch.empty_like(order, dtype=torch.bool)
    chosen[order] = means <= max_moment
    inside[mask] = chosen
    return only(inside, mask, lengths=None, like=x)


@torch.no_grad()
def advantage_mask(
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    max_advantage: float = 3.0,
) -> Correction:
    """Weight 0 for advantages beyond `max_advantage` on either side, or 1. Pure. Local.

    For advantages that are divided by their standard deviation this is the three-sigma filter of
    stable-reinforce.

    Raises:
        ShapeError: as for `importance_weights`.
        UsageError: `max_advantage` is not above 0.

    Source: arXiv:2505.02835 (StableReinforce). Tinker's loss of that name is not published.
    """
    check_tokens(mask, advantages=advantages)
    if not max_advantage > 0:
        raise UsageError(f"max_advantage must be above 0; got {max_advantage}")
    values = masked(advantages, mask)
    return only(values.abs() <= max_advantage, mask, lengths=None, like=values)


@torch.no_grad()
def clip_cov_mask(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    fraction: float = 2e-4,
    min_covariance: float = 1.0,
    max_covariance: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    generator: torch.Generator | None = None,
) -> Correction:
    """Weight 0 for a random few of the tokens that lower the entropy most, or 1. Pure. Local.

    A token's covariance is (A - mean A) (log p - mean log p), over the batch. Candidates have a
    covariance between the bounds, and are not clipped by `grpo_loss`. A fraction of all tokens is
    drawn from the candidates, at least one. Call it once for all tokens of a step, and give
    `grpo_loss` the same clips.

    Args:
        generator: on any device. By default torch's own.

    Raises:
        ShapeError: as for `importance_weights`.
        UsageError: `fraction` is not in (0, 1], or a clip is out of range.

    Source: arXiv:2505.22617 (Clip-Cov).
    """
    check_tokens(
        mask,
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
    )
    check_clips(clip_low, clip_high)
    few = _few(fraction, mask)
    ratio = bounded_ratio(log_ratios(trainer_logprobs, rollout_logprobs, mask))
    a = masked(advantages, mask)
    stopped = ((a > 0) & (ratio > 1 + clip_high)) | ((a < 0) & (ratio < 1 - clip_low))
    covariance = _covariances(trainer_logprobs, advantages, mask)
    eligible = mask & ~stopped & (covariance > min_covariance) & (covariance < max_covariance)
    places = eligible.flatten().nonzero()[:, 0]
    drawn = torch.randperm(places.numel(), generator=generator, device=_device(generator, mask))
    inside = torch.ones_like(mask).flatten()
    inside[places[drawn.to(mask.device)[:few]]] = False
    return only(inside.view_as(mask), mask, lengths=None, like=ratio)


@torch.no_grad()
def kl_cov_tokens(
    trainer_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    fraction: float = 2e-4,
) -> Bool[Tensor, "*tokens"]:
    """Choose the tokens with the largest covariance of advantage and log-probability. Pure. Local.

    Pass them as the mask of `kl_loss(..., estimator="abs", gradient="estimator")`, and add that to
    `grpo_loss(clip_low=1, clip_high=math.inf)`. Together this is KL-Cov. It chooses a fraction of
    all tokens, at least one. Call it once for all tokens of a step.

    Raises:
        ShapeError: as for `importance_weights`.
        UsageError: `fraction` is not in (0, 1].

    Source: arXiv:2505.22617 (KL-Cov).
    """
    check_tokens(mask, trainer_logprobs=trainer_logprobs, advantages=advantages)
    few = _few(fraction, mask)
    covariance = _covariances(trainer_logprobs, advantages, mask)
    places = covariance.masked_fill(~mask, -math.inf).flatten().topk(few).indices
    chosen = torch.zeros_like(mask).flatten()
    chosen[places] = True
    return chosen.view_as(mask) & mask


def _covariances(trainer_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    # float64: in float32 the mean of many equal numbers would differ from these numbers.
    count = mask.sum().clamp(min=1)
    a, log_p = masked(advantages, mask).double(), masked(trainer_logprobs, mask).double()
    return (a - a.sum() / count) * (log_p - log_p.sum() / count)


def _few(fraction: float, mask: Tensor) -> int:
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction must be above 0 and at most 1; got {fraction}")
    tokens = int(mask.sum())
    return min(max(int(fraction * tokens), 1), tokens)


def _device(generator: torch.Generator | None, mask: Tensor) -> torch.device:
    return mask.device if generator is None else generator.device
