"""Importance weights, the counts of every correction, and measures of how off-policy a batch is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...errors import UsageError
from ...groups import check_group
from ..tokens import bounded_ratio, check_tokens, log_ratios, masked, sequence_sums

__all__ = [
    "Correction",
    "counted",
    "effective_sample_size",
    "importance_weights",
    "off_policy_metrics",
    "only",
]


@dataclass(frozen=True, eq=False)
class Correction:
    """Weights of tokens, and counts of changed weights.

    Args:
        weights: without gradient. 0 for tokens that the caller or the correction masks.
        tokens: unmasked tokens of the caller: kept + truncated + masked.
        kept: weights within the bounds.
        truncated: weights that were set to a bound.
        masked: weights that were set to 0.
        ess: the effective sample size of the weights, (sum w)^2 / sum w^2. It is of tokens, or of
            sequences if all tokens of a sequence have the same weight.
        samples: the number of weights, as tokens or sequences. `ess / samples` is 1 if all weights
            are equal.
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
    the ratio itself                      `max_ratio=math.inf`
    ====================================  =======================================================

    Args:
        level: "token" gives each token its own r. "sequence" gives it the product of r over its
            sequence, which is unbiased, with a variance that grows with the length. "geometric"
            gives it the geometric mean.
        beyond: treats a ratio outside `[min_ratio, max_ratio]`. "truncate" sets it to the bound,
            "mask" removes the token, "reject" removes its whole sequence.
        max_ratio: at least 1. A smaller value means less variance and more bias.
        sequence_ids: an integer per token. By default each row of `[rollouts, tokens]` is one
            sequence. All tokens of a sequence must be on this rank. Not needed if `level` is
            "token" and `beyond` is not "reject".

    Raises:
        ShapeError: shapes differ, a dtype is wrong, or sequences are needed and unknown.
        UsageError: the bounds exclude 1, or `level` or `beyond` is unknown.

    Source: arXiv:2505.24034 (truncation), 2510.18855 (IcePop); Ionides, 2008 (TIS).
    """
    check_tokens(
        mask,
        sequence_ids=sequence_ids,
        trainer_logprobs=trainer_logprobs,
        rollout_logprobs=rollout_logprobs,
    )
    if not 0 <= min_ratio <= 1 <= max_ratio:
        raise UsageError(f"needs 0 <= min_ratio <= 1 <= max_ratio; got {min_ratio}, {max_ratio}")
    if level not in ("token", "sequence", "geometric"):
        raise UsageError(f'level is "token", "sequence" or "geometric"; got {level!r}')
    if beyond not in ("truncate", "mask", "reject"):
        raise UsageError(f'beyond is "truncate", "mask" or "reject"; got {beyond!r}')
    log_ratio = log_ratios(trainer_logprobs, rollout_logprobs, mask)
    lengths = None
    if level != "token":
        lengths = sequence_sums(mask, sequence_ids).clamp(min=1)
        sums = sequence_sums(log_ratio, sequence_ids)
        log_ratio = (sums if level == "sequence" else sums / lengths).to(log_ratio.dtype)
    low = math.log(min_ratio) if min_ratio > 0 else -math.inf
    high = math.log(max_ratio)
    outside = (log_ratio < low) | (log_ratio > high)
    weights = bounded_ratio(log_ratio.clamp(low, high))
    nobody = torch.zeros_like(mask)
    if beyond == "truncate":
        return counted(weights, mask, truncated=outside, dropped=nobody, lengths=lengths)
    if beyond == "reject":
        outside = sequence_sums(outside & mask, sequence_ids) > 0
    return counted(weights, mask, truncated=nobody, dropped=outside, lengths=lengths)


@torch.no_grad()
def effective_sample_size(
    weights: Float[Tensor, "*tokens"], *, mask: Bool[Tensor, "*tokens"]
) -> float:
    """Return the number of equally weighted tokens of the same variance. Pure. Local.

    It is (sum w)^2 / sum w^2, for instance of a product of corrections, or 0 if all weights are 0.
    The host reads it. To combine ranks, add sums of weights and of squares instead of this.

    Raises:
        ShapeError: the shapes differ, or a dtype is wrong.
    """
    check_tokens(mask, weights=weights)
    w = masked(weights, mask).double()
    return _ess(float(w.sum()), float(w.square().sum()))


@torch.no_grad()
def off_policy_metrics(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Measure a batch: effective sample size and KL estimates. Collective with `group`, or local.

    "ess" is the effective sample size of the unbounded ratios, divided by the number of tokens. It
    is 1 on policy, and near 0 if a few tokens carry all the weight. With `x = log p_trainer - log
    p_rollout`, "k1" is the mean of `-x`, "k2" of `x^2 / 2`, and "k3" of `exp(x) - 1 - x`. They
    estimate KL(rollout || trainer) in nats per token. Without tokens the result is 1 and zeros.
    Return them from `train`, alone or with other metrics, because `Step.postfix` shows them.

    Args:
        group: the ranks that hold parts of the batch. Each rank gets the figures of the whole.

    Raises:
    Raises:
        ShapeError: the shapes differ, or a dtype is wrong.
        PlanError: this rank is not in `group`.

    Source: Kish, 1965 (sample size); Schulman, 2020 (joschu.net/blog/kl-approx).
    """
    check_tokens(mask, trainer_logprobs=trainer_logprobs, rollout_logprobs=rollout_logprobs)
    x = log_ratios(trainer_logprobs, rollout_logprobs, mask).double()
    ratio = masked(bounded_ratio(x), mask)
    sums = torch.stack(
        [
            mask.sum().double(),
            ratio.sum(),
            ratio.square().sum(),
            -x.sum(),
            x.square().sum() / 2,
            masked(ratio - 1 - x, mask).sum(),
        ]
    )
    if group is not None:
        check_group(group)
        dist.all_reduce(sums, group=group)
    tokens, first, second, *estimates = sums.tolist()
    if not tokens:
        return {"ess": 1.0, "k1": 0.0, "k2": 0.0, "k3": 0.0}
    named = zip(("k1", "k2", "k3"), estimates, strict=True)
    return {"ess": _ess(first, second) / tokens} | {name: each / tokens for name, each in named}


def _ess(first: float, second: float) -> float:
    return first**2 / second if second else 0.0


def only(inside: Tensor, mask: Tensor, *, lengths: Tensor | None, like: Tensor) -> Correction:
    """Return weights of 1 where `inside`, and 0 elsewhere. Local. The host reads once.

    Args:
        lengths: of each token's sequence, if all its tokens have the same weight.
        like: gives the dtype.
    """
    return counted(
        torch.ones_like(like),
        mask,
        truncated=torch.zeros_like(mask),
        dropped=~inside,
        lengths=lengths,
    )


def counted(
    weights: Tensor, mask: Tensor, *, truncated: Tensor, dropped: Tensor, lengths: Tensor | None
) -> Correction:
    """Set weights to zero and count them. Local. The host reads once.

    Args:
        truncated: weights that were set to a bound.
        dropped: weights to set to 0.
        lengths: of each token's sequence, if all its tokens have the same weight.
    """
    weights = masked(weights, mask & ~dropped)
    # Each token has one over its sequence's length, so that each sequence counts once.
    share = masked(torch.ones_like(weights).double() if lengths is None else 1 / lengths, mask)
    w = share * weights.double()
    figures = [mask.sum(), (truncated & mask).sum(), (dropped & mask).sum()]
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
