"""Weights that correct for tokens sampled by another policy than the one that learns."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import ShapeError, UsageError

__all__ = ["check_tokens", "group_advantages", "importance_weights"]


def check_tokens(*masks: Any, **operands: Any) -> None:
    """Refuse operands that are not one value a token: broadcasting would pair the wrong ones. Pure.

    Args:
        masks: bool, at most one, of the same shape.
        operands: floating, by their name in messages.

    Raises:
        ShapeError: they differ in shape or device, or one has another dtype.
    """
    first, like = next(iter(operands.items()))
    for name, x in [*operands.items(), *(("mask", mask) for mask in masks)]:
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
        if x.shape != like.shape:
            raise ShapeError(
                f"{name} {list(x.shape)} and {first} {list(like.shape)} differ in shape, and"
                " nothing is broadcast. One value a rollout: x[:, None].expand_as(mask)."
            )
        if x.device != like.device:
            raise ShapeError(f"{name} is on {x.device}, {first} on {like.device}")
        if name == "mask" and x.dtype != torch.bool:
            raise ShapeError(f"mask must be bool; got {x.dtype}. Pass mask.bool().")
        if name != "mask" and not x.is_floating_point():
            raise ShapeError(f"{name} must be floating; got {x.dtype}. Pass {name}.float().")


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
        ShapeError: the two differ in shape, or one is not floating.
        UsageError: `max_ratio` is below 1, or `beyond` is unknown.

    Source: arXiv:2505.24034 (one-sided truncation).
    """
    check_tokens(trainer_logprobs=trainer_logprobs, rollout_logprobs=rollout_logprobs)
    if not max_ratio >= 1:
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
    """Return how much better each rollout is than the mean of its group. Pure; local.

    Args:
        normalise: divide by the group's standard deviation, as GRPO does. Without it groups with
            larger differences count more (Dr. GRPO).

    Raises:
        ShapeError: the rewards are not floating `[groups, members]`, with a member.

    Source: arXiv:2402.03300 (GRPO), arXiv:2503.20783 (Dr. GRPO).
    """
    if not isinstance(rewards, Tensor):
        raise ShapeError(f"rewards must be a torch.Tensor; got {type(rewards).__name__}")
    if rewards.ndim != 2 or not rewards.is_floating_point() or not rewards.shape[1]:
        raise ShapeError(
            f"rewards must be floating [groups, members]; got {rewards.dtype}"
            f" {list(rewards.shape)}. One group alone: rewards.float()[None]."
        )
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if not normalise or not len(centred):
        return centred
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + epsilon)
