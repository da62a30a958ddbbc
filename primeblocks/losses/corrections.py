"""Weights that correct a loss for tokens that another policy sampled.

Most functions return a `Correction` with weights per token, counts and the effective sample size.
Pass the weights as `weights=` to any loss. The weights have no gradient. To combine corrections,
multiply their weights: `a.weights * b.weights`. The ratio r of a token is `p_trainer / p_rollout`.
If the loss itself uses a ratio to an old policy, r is `p_old / p_rollout`. Masked tokens may have
any values. A ratio above `e**20` counts as `e**20`. If a log-probability of an unmasked token is
NaN, the token's weight is NaN, and so is the loss. All functions raise `ShapeError` if operands
differ in shape or have a wrong dtype.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import UsageError
from ..groups import agreed
from .tokens import bounded_ratio, check_clips, check_tokens, log_ratios, masked, sequence_sums

__all__ = [
    "Correction",
    "clip_cov_mask",
    "entropy_scaled_mask",
    "importance_weights",
    "kl_cov_tokens",
    "off_policy_metrics",
    "second_moment_mask",
    "sequence_outlier_mask",
]


@dataclass(frozen=True, eq=False)
class Correction:
    """Weights of tokens, and counts of changed weights.

    Args:
        weights: without gradient. Tokens that the caller or the correction masks have weight 0.
        tokens: the number of tokens that the caller did not mask: kept + truncated + masked.
        kept: the number of weights within the bounds.
        truncated: the number of weights that were set to a bound.
        masked: the number of weights that were set to 0.
        ess: the effective sample size, (sum w)^2 / sum w^2. The samples are tokens, or sequences if
            all tokens of a sequence have the same weight. With equal weights, `ess / samples` is 1.
        samples: the number of tokens or sequences from which `ess` was computed.
    """

    weights: Tensor
    tokens: int
    kept: int
    truncated: int
    masked: int
    ess: float
    samples: int


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    level: Literal["token", "sequence", "geometric"] = "token",
    beyond: Literal["truncate", "mask", "reject"] = "truncate",
    min_ratio: float = 0.0,
    max_ratio: float = 2.0,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> Correction:
    """Bounded ratios of tokens or sequences. Pure. Local.

    ====================================  =======================================================
    TIS (truncated importance sampling)   `beyond="truncate"`
    MIS (masked importance sampling)      `beyond="mask"`
    IcePop                                `beyond="mask", min_ratio=0.5, max_ratio=5`
    MIS of sequences                      `level="sequence", beyond="mask"`
    rejection by a token                  `beyond="reject", min_ratio=1e-4, max_ratio=1e4`
    ====================================  =======================================================

    Args:
        level: with "token", the weight of a token is the token's r. With "sequence" or "geometric",
            the weight is the product or the geometric mean of r over the token's sequence. The
            product is unbiased, but its variance grows with the length.
        beyond: the treatment of a ratio outside `[min_ratio, max_ratio]`. "truncate" sets the ratio
            to the bound, "mask" removes the token, and "reject" removes the token's whole sequence.
        max_ratio: the upper bound, at least 1. A smaller bound gives less variance and more bias.
        sequence_ids: an integer per token. By default each of several rows `[rollouts, tokens]` is
            one sequence. All tokens of a sequence must be on this rank. With `level="token"`, the
            call uses sequences only for `beyond="reject"`.

    Raises:
        ShapeError: sequences are needed, and packed tokens or a single row lack `sequence_ids`.
        UsageError: the bounds are not 0 <= min <= 1 <= max, or `level` or `beyond` is unknown.

    Source: arXiv:2505.24034 (truncation), 2510.18855 (IcePop); Ionides, 2008 (TIS).
    """
    log_ratio = _log_ratios(trainer_logprobs, rollout_logprobs, mask, sequence_ids)
    if not 0 <= min_ratio <= 1 <= max_ratio:
        raise UsageError(f"pass 0 <= min_ratio <= 1 <= max_ratio; got {min_ratio}, {max_ratio}")
    if level not in ("token", "sequence", "geometric"):
        raise UsageError(f'level must be "token", "sequence" or "geometric"; got {level!r}')
    if beyond not in ("truncate", "mask", "reject"):
        raise UsageError(f'beyond must be "truncate", "mask" or "reject"; got {beyond!r}')
    lengths = None
    if level != "token":
        lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
        sums = sequence_sums(log_ratio, sequence_ids)
        log_ratio = (sums if level == "sequence" else sums / lengths).to(log_ratio.dtype)
    low = math.log(min_ratio) if min_ratio > 0 else -math.inf
    high = math.log(max_ratio)
    outside = (log_ratio < low) | (log_ratio > high)
    weights = bounded_ratio(log_ratio.clamp(low, high))
    if beyond == "truncate":
        return _counted(weights, mask, truncated=outside, lengths=lengths)
    if beyond == "reject":
        outside = sequence_sums(outside & mask, sequence_ids) > 0
    return _counted(weights, mask, dropped=outside, lengths=lengths)


@torch.no_grad()
def off_policy_metrics(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Measure a batch: effective sample size and KL estimates. Collective with `group`, else local.

    "ess" is the effective sample size of the uncorrected ratios, divided by the number of tokens.
    "ess" is 1 on policy, and near 0 if a few tokens have almost all the weight. With
    `x = log p_trainer - log p_rollout`, the metrics "k1", "k2" and "k3" are the means of `-x`,
    `x^2 / 2` and `exp(x) - 1 - x`. "k1", "k2" and "k3" estimate KL(rollout || trainer) in nats per
    token. If all tokens are masked, "ess" is 1 and the means are 0.

    Args:
        group: the ranks that have parts of the batch. Each rank gets the result of the whole batch.

    Raises:
        PlanError, RankError: this rank is not in `group`, or another rank refused its arguments.

    Source: Kish, 1965 (sample size); Schulman, 2020 (joschu.net/blog/kl-approx).
    """
    with nullcontext() if group is None else agreed("metrics", trainer_logprobs, group=group):
        x = _log_ratios(trainer_logprobs, rollout_logprobs, mask).double()
    ratio = masked(bounded_ratio(x), mask)
    parts = mask.double(), ratio, ratio.square(), -x, x.square() / 2, masked(ratio - 1 - x, mask)
    sums = torch.stack([part.sum() for part in parts])
    if group is not None:
        dist.all_reduce(sums, group=group)
    tokens, first, second, *estimates = sums.tolist()
    k1, k2, k3 = (each / max(tokens, 1.0) for each in estimates)
    ess = _ess(first, second) / tokens if tokens else 1.0
    return {"ess": ess, "k1": k1, "k2": k2, "k3": k3}


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
    """Set weights to 0 for sequences in which engine and trainer disagree. Pure. Local.

    With x = log r, a token's statistic is exp(abs(x)) ("error"), -x ("k1"), x^2 / 2 ("k2") or
    exp(x) - 1 - x ("k3"). If the mean or maximum of the statistic is above `bound`, the sequence
    gets weight 0. All other sequences get weight 1.

    Args:
        bound: for "error", a ratio above 1. For "k1" to "k3", a KL divergence per token, in nats.
        advantages: if you pass advantages, only sequences with a negative sum of advantages can get
            weight 0. With "k1", this rule is the off-policy mask of DeepSeek-V3.2.

    Raises:
        UsageError: `statistic` or `over` is unknown, or `bound` is NaN.

    Source: arXiv:2512.23075 (maximum of k3), 2512.02556 (DeepSeek-V3.2); NeMo-RL's
        seq_logprob_error_threshold is the mean of "error".
    """
    x = _log_ratios(trainer_logprobs, rollout_logprobs, mask, sequence_ids, advantages=advantages)
    if math.isnan(bound) or over not in ("mean", "max"):
        raise UsageError(f'over must be "mean" or "max", and bound a number; got {over!r}, {bound}')
    by_name = {
        "error": lambda: bounded_ratio(x.abs()),
        "k1": lambda: -x,
        "k2": lambda: 0.5 * x.square(),
        "k3": lambda: bounded_ratio(x.double()) - 1 - x,
    }
    if statistic not in by_name:
        raise UsageError(f"statistic must be one of {', '.join(by_name)}; got {statistic!r}")
    values = masked(by_name[statistic](), mask)
    lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
    if over == "mean":
        outliers = sequence_sums(values, sequence_ids) / lengths > bound
    else:
        outliers = sequence_sums((values > bound) & mask, sequence_ids) > 0
    if advantages is not None:
        outliers &= sequence_sums(masked(advantages, mask), sequence_ids) < 0
    return _counted(1 + 0 * x, mask, dropped=outliers, lengths=lengths)


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
    """Weight 1 if (log r)^2 / (entropy + epsilon) <= max_score, otherwise 0. Pure. Local.

    Log-ratios usually grow with the entropy. Tune `max_score` and `epsilon` for your engine.

    Args:
        entropies: the entropy of the engine's distribution at each token, in nats, not negative.

    Raises:
        UsageError: `max_score` is below 0, or `epsilon` is not above 0.

    Source: arXiv:2607.22186 (ESTR).
    """
    x = _log_ratios(trainer_logprobs, rollout_logprobs, mask, entropies=entropies)
    if not (max_score >= 0 and epsilon > 0):
        raise UsageError(f"pass max_score >= 0 and epsilon > 0; got {max_score}, {epsilon}")
    score = x.square() / (masked(entropies, mask) + epsilon)
    return _counted(1 + 0 * x, mask, dropped=~(score <= max_score))


@torch.no_grad()
def second_moment_mask(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    max_moment: float = 0.04,
) -> Correction:
    """Set weights to 0 for the tokens with the largest abs(log r). Pure. Local.

    For the tokens that keep weight 1, the mean of (log r)^2 is at most `max_moment`. Among tokens
    with equal abs(log r), earlier tokens are kept first. Because the mean is over the batch, call
    this function once for all tokens of a step, before a split into micro-batches.

    Raises:
        UsageError: `max_moment` is below 0.

    Source: arXiv:2510.01161 (M2PO).
    """
    x = _log_ratios(trainer_logprobs, rollout_logprobs, mask)
    if not max_moment >= 0:
        raise UsageError(f"max_moment must not be below 0; got {max_moment}")
    squares, order = x.double().square()[mask].sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, squares.numel() + 1, device=x.device)
    inside = torch.zeros_like(mask)
    chosen = torch.empty_like(order, dtype=torch.bool)
    chosen[order] = means <= max_moment
    inside[mask] = chosen
    return _counted(1 + 0 * x, mask, dropped=~inside)


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
    """Weight 0 for a few random tokens among the tokens that lower the entropy most. Pure. Local.

    A token's covariance is (A - mean A) (log p - mean log p), with means over the batch. The
    candidates have a covariance between `min_covariance` and `max_covariance`, and `grpo_loss` does
    not clip them. `generator` draws `fraction` x (unmasked tokens) candidates, at least one, or all
    candidates if there are fewer. All other tokens get weight 1. Call this function once for all
    tokens of a step. Pass the same clips to `grpo_loss`.

    Raises:
        UsageError: `fraction` is not in (0, 1], or a clip is out of range.

    Source: arXiv:2505.22617 (Clip-Cov).
    """
    x = _log_ratios(trainer_logprobs, rollout_logprobs, mask, advantages=advantages)
    check_clips(clip_low, clip_high)
    few, ratio = _few(fraction, mask), bounded_ratio(x)
    a = masked(advantages, mask)
    stopped = ((a > 0) & (ratio > 1 + clip_high)) | ((a < 0) & (ratio < 1 - clip_low))
    covariance = _covariances(trainer_logprobs, advantages, mask)
    eligible = mask & ~stopped & (covariance > min_covariance) & (covariance < max_covariance)
    places = eligible.flatten().nonzero()[:, 0]
    device = mask.device if generator is None else generator.device
    drawn = torch.randperm(places.numel(), generator=generator, device=device)
    dropped = torch.zeros_like(mask).flatten()
    dropped[places[drawn.to(mask.device)[:few]]] = True
    return _counted(1 + 0 * x, mask, dropped=dropped.view_as(mask))


@torch.no_grad()
def kl_cov_tokens(
    trainer_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    fraction: float = 2e-4,
) -> Bool[Tensor, "*tokens"]:
    """Choose the tokens with the largest covariance of advantage and log-probability. Pure. Local.

    For KL-Cov, add `kl_loss(..., mask=result, estimator="abs", gradient="estimator")` to
    `grpo_loss(..., clip_low=1, clip_high=math.inf)`. The result marks `fraction` of the unmasked
    tokens, but at least one. Call this function once for all tokens of a step.

    Raises:
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


def _log_ratios(
    trainer_logprobs: Any, rollout_logprobs: Any, mask: Any, sequence_ids: Any = None, **others: Any
) -> Tensor:
    operands = {"trainer_logprobs": trainer_logprobs, "rollout_logprobs": rollout_logprobs}
    check_tokens(mask, sequence_ids=sequence_ids, **operands, **others)
    return log_ratios(trainer_logprobs, rollout_logprobs, mask)


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


def _ess(first: float, second: float) -> float:
    return first**2 / second if second else 0.0


def _counted(
    weights: Tensor,
    mask: Tensor,
    *,
    truncated: Tensor | None = None,
    dropped: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Correction:
    """Set dropped weights to zero, except NaN, and count. The host reads once.

    `lengths` are those of each token's sequence, if all its tokens have the same weight.
    """
    real = mask & ~weights.isnan()  # Masks pass 1 + 0 * x, which is NaN where x is.
    truncated, dropped = (real & (False if x is None else x) for x in (truncated, dropped))
    weights = masked(weights, mask & ~dropped)
    # A token's share is 1 / (length of its sequence), so that each sequence counts once.
    share = masked(torch.ones_like(weights).double() if lengths is None else 1 / lengths, mask)
    w = share * weights.double()
    figures = [mask.sum(), truncated.sum(), dropped.sum()]
    figures += [share.sum(), w.sum(), (w * weights).sum()]
    read = torch.stack([x.double() for x in figures]).tolist()
    tokens, changed, gone, samples = (round(x) for x in read[:4])
    return Correction(
        weights,
        tokens=tokens,
        kept=tokens - changed - gone,
        truncated=changed,
        masked=gone,
        ess=_ess(*read[4:]),
        samples=samples,
    )
