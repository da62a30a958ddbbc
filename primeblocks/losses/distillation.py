"""On-policy distillation: the student samples, and teachers say how likely its tokens are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ShapeError, UsageError
from .tokens import TokenLoss, check_tokens, finite, log_ratios, masked, total

__all__ = ["teacher_advantages", "top_k_loss"]


@torch.no_grad()
def teacher_advantages(
    student_logprobs: Float[Tensor, "*tokens"],
    *teachers: Float[Tensor, "*tokens"],
    mask: Bool[Tensor, "*tokens"],
    teacher_weights: Sequence[Tensor] | None = None,
) -> Float[Tensor, "*tokens"]:
    """Advantages sg[log p_teacher - log p_student], minus k1 of the reverse KL. Pure; local.

    Give them to any policy-gradient loss, alone or added to those of rewards. Their gradient is
    that of KL(student || teacher), a token at a time; a correction of the tokens' age applies as to
    any advantage.

    Args:
        teachers: log-probabilities of the student's tokens.
        teacher_weights: of several teachers, one a token each: the sum of weighted advantages. A
            teacher may hold anything where its weight is 0, so that each sequence has its own.

    Raises:
        ShapeError: shapes differ, or a dtype is wrong.
        UsageError: no teacher, or weights that are not one for each.

    Source: arXiv:2306.08543 (reverse KL by policy gradient), 2306.13649 (on-policy distillation).
    """
    if not teachers or (len(teachers) > 1 and teacher_weights is None):
        raise UsageError(f"{len(teachers)} teachers need as many teacher_weights, and at least one")
    check_tokens(mask, student_logprobs=student_logprobs, teacher_logprobs=teachers[0])
    if teacher_weights is None:
        teacher_weights = [torch.ones_like(teachers[0])]
    if len(teacher_weights) != len(teachers):
        raise UsageError(f"{len(teachers)} teachers have {len(teacher_weights)} teacher_weights")
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
    """KL of a token's distribution over a few words: the student's most likely ones. Pure; local.

    "reverse" is KL(student || teacher), "forward" KL(teacher || student). No sampling noise, but
    words beyond the few are one. Of several teachers: one loss each, with `weights`.

    Args:
        student_logprobs: differentiable; of the same words as the teacher's.
        rest: what the words leave of both is a word more ("bucket"), or the few are normalised to
            add up to 1 ("renormalise"), which lets the rest drift.

    Raises:
        ShapeError: shapes differ, or a dtype is wrong.
        UsageError: `direction` or `rest` is unknown.

    Source: arXiv:2306.13649 (GKD), on the student's top-k.
    """
    if direction not in ("reverse", "forward") or rest not in ("bucket", "renormalise"):
        raise UsageError(f"no such loss: direction {direction!r}, rest {rest!r}")
    check_tokens(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    if student_logprobs.ndim < 2 or not student_logprobs.shape[-1]:
        raise ShapeError(f"needs [*tokens, words]; got {list(student_logprobs.shape)}")
    check_tokens(mask, sequence_ids=sequence_ids, words=student_logprobs[..., 0], weights=weights)
    student = _distribution(student_logprobs, mask, rest)
    teacher = _distribution(teacher_logprobs.detach(), mask, rest)
    of, to = (student, teacher) if direction == "reverse" else (teacher, student)
    losses = masked((of.exp() * (of - to)).sum(-1), mask)
    clipped = torch.zeros_like(mask)
    return total(losses, mask=mask, clipped=clipped, weights=weights, sequence_ids=sequence_ids)


def _distribution(logprobs: Tensor, mask: Tensor, rest: str) -> Tensor:
    """Logs that add up to 1, the same for every masked token."""
    kept = mask[..., None].expand_as(logprobs)
    x = finite(logprobs, kept)
    x = torch.where(kept, x, torch.full_like(x, -math.log(2 * x.shape[-1])))
    of_all = x.logsumexp(-1, keepdim=True)
    if rest == "renormalise":
        return x - of_all
    # Rounded words may add up to 1 and more; the rest is never nothing.
    left = of_all.clamp(max=-torch.finfo(x.dtype).eps)
    return torch.cat([x, torch.log(-torch.expm1(left))], dim=-1)
