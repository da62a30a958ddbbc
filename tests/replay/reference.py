"""Routers as plain loops in float64, one token and one expert at a time.

The functions are differentiable, slow, and independent of the code that they test. The loops act on
scalars of torch. Choices are returned as lists of lists. To impose choices, pass such lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sigmoid_router", "softmax_router"]

Choices = list[list[int]]


def softmax_router(
    hidden: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    renormalise: bool,
    bias: Tensor | None = None,
    imposed: list[list[int] | None] | None = None,
) -> tuple[Tensor, Choices]:
    """Gate weights `[tokens, top_k]` and choices of a softmax router.

    Args:
        hidden: `[tokens, dim]`.
        weight: `[experts, dim]`.
        bias: `[experts]`, added to the logits.
        imposed: for each token the choices to follow, or None for the router's own choice.
    """
    gates, choices = [], []
    for token, logits in enumerate(_logits(hidden, weight, bias)):
        largest = max(logit.item() for logit in logits)
        powers = [torch.exp(logit - largest) for logit in logits]
        scores = [power / sum(powers) for power in powers]
        chosen = _choose(scores, top_k, None if imposed is None else imposed[token])
        total = sum(scores[expert] for expert in chosen) if renormalise else 1.0
        gates.append(torch.stack([scores[expert] / total for expert in chosen]))
        choices.append(chosen)
    return torch.stack(gates), choices


def sigmoid_router(
    hidden: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    correction_bias: Tensor,
    renormalise: bool,
    scale: float,
    groups: int = 1,
    groups_kept: int = 1,
    softcap: float = 0.0,
    imposed: list[list[int] | None] | None = None,
) -> tuple[Tensor, Choices]:
    """Gate weights `[tokens, top_k]` and choices of a sigmoid router with a bias for choosing only.

    Args:
        hidden, weight, imposed: as for `softmax_router`.
        correction_bias: `[experts]`, added to the scores by which experts are chosen.
        groups: the number of groups of neighbouring experts. The score of a group is the sum of its
            two best scores. Only experts of the `groups_kept` best groups are chosen.
        softcap: bounds the logits by a hyperbolic tangent. 0 leaves them unchanged.
    """
    gates, choices = [], []
    for token, logits in enumerate(_logits(hidden, weight, None)):
        if softcap:
            logits = [softcap * torch.tanh(logit / softcap) for logit in logits]  # noqa: PLW2901
        scores = [1 / (1 + torch.exp(-logit)) for logit in logits]
        biased = [score + bias for score, bias in zip(scores, correction_bias, strict=True)]
        if groups > 1:
            biased = _limit(biased, groups, groups_kept)
        chosen = _choose(biased, top_k, None if imposed is None else imposed[token])
        total = sum(scores[expert] for expert in chosen) if renormalise else 1.0
        gates.append(torch.stack([scale * scores[expert] / total for expert in chosen]))
        choices.append(chosen)
    return torch.stack(gates), choices


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[list[Tensor]]:
    return [
        [
            torch.dot(token.double(), row.double()) + (0.0 if bias is None else bias[expert])
            for expert, row in enumerate(weight)
        ]
        for token in hidden
    ]


def _choose(scores: list[Tensor], top_k: int, imposed: list[int] | None) -> list[int]:
    if imposed is not None:
        return imposed
    by_score = sorted(range(len(scores)), key=lambda expert: scores[expert].item(), reverse=True)
    return by_score[:top_k]


def _limit(scores: list[Tensor], groups: int, kept: int) -> list[Tensor]:
    size = len(scores) // groups
    members = [scores[group * size : (group + 1) * size] for group in range(groups)]
    best = [sum(sorted(score.item() for score in group)[-2:]) for group in members]
    winners = sorted(range(groups), key=lambda group: best[group], reverse=True)[:kept]
    never = torch.tensor(-torch.inf, dtype=torch.float64)
    return [score if expert // size in winners else never for expert, score in enumerate(scores)]
