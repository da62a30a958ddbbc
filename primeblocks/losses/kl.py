"""KL divergences from a reference policy, as losses of tokens."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import UsageError
from .tokens import (
    MAX_LOG_RATIO,
    TokenLoss,
    bounded_ratio,
    check_tokens,
    log_ratios,
    masked,
    total,
)

__all__ = ["kl_loss"]


def kl_loss(
    trainer_logprobs: Float[Tensor, "*tokens"],
    reference_logprobs: Float[Tensor, "*tokens"],
    *,
    mask: Bool[Tensor, "*tokens"],
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3",
    direction: Literal["reverse", "forward"] = "reverse",
    gradient: Literal["unbiased", "estimator"] = "unbiased",
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """Estimate KL(trainer || reference) or KL(reference || trainer), summed. Pure. Local.

    With x = log p_trainer - log p_reference and u = exp(-x), for a token that the trainer sampled:

    =========  ==========================  ============================  =========================
    estimator  reverse, KL(p || ref)       forward, KL(ref || p)         its value
    =========  ==========================  ============================  =========================
    k1         x                           -u x                          unbiased, of either sign
    k2         x^2 / 2                     x^2 / 2                       biased
    k3         u - 1 + x                   1 - u - u x                   unbiased, never below 0
    abs        abs(x)                      abs(x)                        no KL; KL-Cov's penalty
    =========  ==========================  ============================  =========================

    The derivative of an estimate does not estimate the derivative. `gradient="unbiased"` takes the
    value from the estimator and the derivative d / d log p from the divergence. That is x for the
    reverse divergence and 1 - u for the forward one, and both are right in the mean.

    `gradient="estimator"` derives the estimator, as most trainers do. For the reverse divergence
    this is right only for k2. The derivative of k1 has mean 0 and teaches nothing. The derivative
    of k3 is 1 - u, which belongs to the *forward* KL. For the forward divergence no estimator's
    derivative is right.

    Args:
        weights: importance weights, if another policy sampled the tokens, such as an engine that is
            versions behind. The statements above then hold for the trainer's policy.

    Raises:
        ShapeError: as for `grpo_loss`.
        UsageError: a name is unknown, or `gradient` is "unbiased" for "abs".

    Source: Schulman, 2020 (joschu.net/blog/kl-approx); arXiv:2510.01555 (gradients).
    """
    check_tokens(
        mask,
        sequence_ids=sequence_ids,
        trainer_logprobs=trainer_logprobs,
        reference_logprobs=reference_logprobs,
        weights=weights,
    )
    if direction not in ("reverse", "forward") or gradient not in ("unbiased", "estimator"):
        raise UsageError(f"no such KL: direction {direction!r}, gradient {gradient!r}")
    if estimator == "abs" and gradient == "unbiased":
        raise UsageError('"abs" estimates no KL. Pass gradient="estimator".')
    x = log_ratios(trainer_logprobs, reference_logprobs, mask)
    values = masked(_estimate(x, estimator, direction), mask)
    if gradient == "unbiased":
        slope = x if direction == "reverse" else 1 - bounded_ratio(-x)
        # Adds 0 to the value. x - x is finite, but log p - log p may not be.
        values = values.detach() + slope.detach() * (x - x.detach())
    clipped = -x > MAX_LOG_RATIO
    return total(values, mask=mask, clipped=clipped, weights=weights, sequence_ids=sequence_ids)


def _estimate(x: Tensor, estimator: str, direction: str) -> Tensor:
    if estimator == "k2":
        return 0.5 * x.square()
    if estimator == "abs":
        return x.abs()
    u = bounded_ratio(-x)
    if estimator == "k1":
        return x if direction == "reverse" else -u * x
    if estimator == "k3":
        return u - 1 + x if direction == "reverse" else 1 - u - u * x
    raise UsageError(f'estimator is "k1", "k2", "k3" or "abs"; got {estimator!r}')
