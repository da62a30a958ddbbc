"""Weights that correct for tokens sampled by another policy than the one that learns."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import UsageError

__all__ = ["group_advantages", "importance_weights"]


def importance_weights(
    trainer_logprobs: Float[Tensor, "*tokens"],
    rollout_logprobs: Float[Tensor, "*tokens"],
    *,
    beyond: Literal["truncate", "mask"] = "truncate",
    max_ratio: float = 2.0,
) -> Float[Tensor, "*tokens"]:
    """The ratio p_trainer / p_rollout of each token, bounded, without gradient. Pure; local.

    Args:
        beyond: a larger ratio counts as `max_ratio` ("truncate"), or not at all ("mask").
        max_ratio: above 1; the smaller, the less variance and the more bias.

    Raises:
        UsageError: `max_ratio` is below 1, or `beyond` is unknown.

    Source: arXiv:2505.24034 (one-sided truncation).
    """
    if max_ratio < 1:
        raise UsageError(f"max_ratio must be at least 1; got {max_ratio}")
    log_ratio = (trainer_logprobs - rollout_logprobs).detach()
    # Bounded before exp: a huge ratio would be inf, and inf * 0 is not 0.
    bounded = log_ratio.clamp(max=math.log(max_ratio)).exp()
    if beyond == "truncate":
        return bounded
    if beyond == "mask":
        return torch.where(log_ratio.exp() > max_ratio, torch.zeros_like(bounded), bounded)
    raise UsageError(f'beyond is "truncate" or "mask"; got {beyond!r}')


def group_advantages(
    rewards: Float[Tensor, "groups members"], *, normalise: bool = True, epsilon: float = 1e-4
) -> Float[Tensor, "groups members"]:
    """How much better than its group's mean each rollout is. Pure; local.

    Args:
        normalise: divide by the group's standard deviation, as GRPO does. Without it groups with
            larger differences count more (Dr. GRPO).

    Source: arXiv:2402.03300 (GRPO), arXiv:2503.20783 (Dr. GRPO).
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if not normalise:
        return centred
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + epsilon)
