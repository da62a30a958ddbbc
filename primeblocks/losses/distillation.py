"""KL divergences as losses: from a reference policy, and from teachers.

In on-policy distillation, the student samples tokens, and teachers score the student's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ShapeError, UsageError
from .tokens import (
    MAX_LOG_RATIO,
    TokenLoss,
    bounded_ratio,
    check_tokens,
    finite,
    log_ratios,
    masked,
    total,
)

__all__ = ["kl_loss", "teacher_advantages", "top_k_loss"]


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
    """Sum estimates of KL(trainer || reference) or KL(reference || trainer). Pure. Local.

    With `x = log p_trainer - log p_reference` and `u = exp(-x)`, a token that the trainer sampled
    has these estimates:

    =========  ==========================  ============================  =========================
    estimator  reverse, KL(p || ref)       forward, KL(ref || p)         its value
    =========  ==========================  ============================  =========================
    k1         x                           -u x                          unbiased, of either sign
    k2         x^2 / 2                     x^2 / 2                       biased
    k3         u - 1 + x                   1 - u - u x                   unbiased, never below 0
    abs        abs(x)                      abs(x)                        no KL; KL-Cov's penalty
    =========  ==========================  ============================  =========================

    In general, the derivative of an estimator is a biased estimate of the divergence's gradient.
    With `gradient="unbiased"`, the loss has the value of the estimator, and an unbiased gradient.
    The derivative of the loss with respect to log p is then x for the reverse divergence, and
    1 - u for the forward divergence.

    `gradient="estimator"` differentiates the estimator, as most trainers do. For the reverse
    divergence, only the derivative of k2 is right. The derivative of k1 has mean 0, so k1 does not
    train the policy. The derivative of the reverse k3 is 1 - u, which belongs to the forward
    divergence. With `direction="forward"`, the derivative of every estimator is wrong.

    Args:
        weights: importance weights, if another policy sampled the tokens, such as an engine with
            older weights. With importance weights, all statements above are also true for tokens
            that the other policy sampled.

    Raises:
        ShapeError: shapes differ, or a dtype is wrong.
        UsageError: `estimator`, `direction` or `gradient` is unknown, or `estimator="abs"` has
            `gradient="unbiased"`.

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
        raise UsageError(
            'direction must be "reverse" or "forward", and gradient "unbiased" or "estimator"; '
            f"got {direction!r} and {gradient!r}"
        )
    if estimator == "abs" and gradient == "unbiased":
        raise UsageError('"abs" does not estimate a KL divergence. Pass gradient="estimator".')
    x = log_ratios(trainer_logprobs, reference_logprobs, mask)
    values = masked(_estimate(x, estimator, direction), mask)
    if gradient == "unbiased":
        slope = x if direction == "reverse" else -_less_one(-x)
        # Adds 0 to the value. x - x is finite, but log p - log p may not be.
        values = values.detach() + slope.detach() * (x - x.detach())
    clipped = -x > MAX_LOG_RATIO
    return total(values, mask=mask, clipped=clipped, weights=weights, sequence_ids=sequence_ids)


@torch.no_grad()
def teacher_advantages(
    student_logprobs: Float[Tensor, "*tokens"],
    *teachers: Float[Tensor, "*tokens"],
    mask: Bool[Tensor, "*tokens"],
    teacher_weights: Sequence[Tensor] | None = None,
) -> Float[Tensor, "*tokens"]:
    """Return `log p_teacher - log p_student` per token, without gradient. Pure. Local.

    Pass the result as advantages to any policy-gradient loss, alone or added to advantages of
    rewards. If you pass only the result, the gradient of the loss estimates the gradient of
    KL(student || teacher) per token. With one teacher and without weights, the result is the
    negative of the estimator k1 of the reverse KL (see `kl_loss`). Corrections for older policies
    work in the same way as for other advantages.

    Args:
        teachers: for each teacher, the log-probabilities of the student's tokens.
        teacher_weights: for several teachers, one tensor per teacher, with a weight per token. The
            result is the weighted sum over teachers. If a weight is 0, the teacher's
            log-probability may have any value. Each sequence may therefore have its own teacher.

    Raises:
        ShapeError: shapes differ, or a dtype is wrong.
        UsageError: no teacher was passed, or `teacher_weights` does not have one tensor per
            teacher.

    Source: arXiv:2306.08543 (reverse KL by policy gradient), 2306.13649 (on-policy distillation).
    """
    if not teachers or (len(teachers) > 1 and teacher_weights is None):
        raise UsageError(
            f"got {len(teachers)} teachers. Pass at least one teacher, and one teacher_weights "
            "tensor per teacher if there are several."
        )
    check_tokens(mask, student_logprobs=student_logprobs, teacher_logprobs=teachers[0])
    if teacher_weights is None:
        teacher_weights = [torch.ones_like(teachers[0])]
    if len(teacher_weights) != len(teachers):
        raise UsageError(
            f"{len(teachers)} teachers need one teacher_weights tensor each; got "
            f"{len(teacher_weights)}"
        )
    result = torch.zeros_like(masked(student_logprobs, mask))
    for teacher, weights in zip(teachers, teacher_weights, strict=True):
        check_tokens(
            mask, student_logprobs=student_logprobs, teacher_logprobs=teacher, weights=weights
        )
        used = mask & (weights != 0)
        result += masked(weights, used) * log_ratios(teacher, student_logprobs, used)
    return result


def top_k_loss(
    student_logprobs: Float[Tensor, "*tokens words"],
    teacher_logprobs: Float[Tensor, "*tokens words"],
    *,
    mask: Bool[Tensor, "*tokens"],
    direction: Literal["reverse", "forward"] = "reverse",
    rest: Literal["bucket", "renormalise"] = "bucket",
    weights: Float[Tensor, "*tokens"] | None = None,
    sequence_ids: Int[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """KL of each token's distribution, over the student's k most likely words. Pure. Local.

    "reverse" is KL(student || teacher), and "forward" is KL(teacher || student). The loss has no
    sampling noise, but cannot distinguish words outside of the k words. With several teachers,
    compute one loss per teacher, and pass the teacher's `weights`.

    Args:
        student_logprobs: differentiable, with the same words as `teacher_logprobs`.
        rest: "bucket" treats all other words as one more word. "renormalise" scales the
            probabilities of the k words to the sum 1. With "renormalise", the loss does not control
            the total probability of all other words.

    Raises:
        ShapeError: shapes differ, or a dtype is wrong.
        UsageError: `direction` or `rest` is unknown.

    Source: arXiv:2306.13649 (GKD), on the student's top-k.
    """
    if direction not in ("reverse", "forward") or rest not in ("bucket", "renormalise"):
        raise UsageError(
            'direction must be "reverse" or "forward", and rest "bucket" or "renormalise"; got '
            f"{direction!r} and {rest!r}"
        )
    check_tokens(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    if student_logprobs.ndim < 2 or not student_logprobs.shape[-1]:
        raise ShapeError(
            f"student_logprobs must be [*tokens, words]; got {list(student_logprobs.shape)}"
        )
    check_tokens(mask, sequence_ids=sequence_ids, words=student_logprobs[..., 0], weights=weights)
    student = _distribution(student_logprobs, mask, rest)
    teacher = _distribution(teacher_logprobs.detach(), mask, rest)
    of, to = (student, teacher) if direction == "reverse" else (teacher, student)
    losses = masked((of.exp() * (of - to)).sum(-1), mask)
    return total(losses, mask=mask, weights=weights, sequence_ids=sequence_ids)


def _estimate(x: Tensor, estimator: str, direction: str) -> Tensor:
    if estimator == "k2":
        return 0.5 * x.square()
    if estimator == "abs":
        return x.abs()
    u = bounded_ratio(-x)
    if estimator == "k1":
        return x if direction == "reverse" else -u * x
    if estimator == "k3":
        less = _less_one(-x)
        return less + x if direction == "reverse" else -less - u * x
    raise UsageError(f'estimator must be "k1", "k2", "k3" or "abs"; got {estimator!r}')


def _less_one(x: Tensor) -> Tensor:
    """Return `bounded_ratio(x) - 1`, without cancellation near 0."""
    return torch.expm1(x.clamp(max=MAX_LOG_RATIO))


def _distribution(logprobs: Tensor, mask: Tensor, rest: str) -> Tensor:
    """Return log-probabilities whose probabilities sum to 1, equal for all masked tokens."""
    kept = mask[..., None].expand_as(logprobs)
    x = finite(logprobs, kept)
    x = torch.where(kept, x, torch.full_like(x, -math.log(2 * x.shape[-1])))
    of_all = x.logsumexp(-1, keepdim=True)
    if rest == "renormalise":
        return x - of_all
    # Rounded probabilities may sum to 1 or more, so the rest is kept above 0.
    left = of_all.clamp(max=-torch.finfo(x.dtype).eps)
    return torch.cat([x, torch.log(-torch.expm1(left))], dim=-1)
