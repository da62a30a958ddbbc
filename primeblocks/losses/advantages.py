"""Advantages of rollouts over other rollouts of the same prompt.

Rewards are `[groups, members]`. If `mask` is False for a member, its reward may have any value, and
its advantage is 0. Differences of rewards are computed in float64. If all members of a group have
equal rewards, all advantages are exactly 0, so a group of one member does not train. To get one
advantage per token, use `advantages.flatten()[sequence_ids]` for packs, or
`advantages.view(-1, 1).expand_as(mask)` for rows.

All functions raise `ShapeError` if the rewards are not floating, have a wrong number of dims, or
have no members. A mask that is not bool or not of the rewards' shape also raises `ShapeError`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import ShapeError, UsageError

__all__ = [
    "group_advantages",
    "leave_one_out_advantages",
    "max_rl_advantages",
    "turn_advantages",
]


def group_advantages(
    rewards: Float[Tensor, "groups members"],
    *,
    mask: Bool[Tensor, "groups members"] | None = None,
    normalise: bool = True,
    epsilon: float = 1e-4,
) -> Float[Tensor, "groups members"]:
    """Return how much better each rollout is than the mean of its group. Pure. Local.

    The advantage of a reward r is (r - mean) / (standard deviation + epsilon). The mean and the
    standard deviation leave out masked members.

    Args:
        normalise: divide by the group's standard deviation, as GRPO does. With `normalise=False`,
            groups with larger differences of rewards count more, as in `Dr. GRPO`.

    Source: arXiv:2402.03300 (GRPO), arXiv:2503.20783 (Dr. GRPO).
    """
    rewards, mask = _checked(rewards, mask, dims=2)
    centred, mean_square = _centred(rewards, mask)
    found = centred / (mean_square.sqrt() + epsilon) if normalise else centred
    return found.to(rewards.dtype)


def leave_one_out_advantages(
    rewards: Float[Tensor, "groups members"], *, mask: Bool[Tensor, "groups members"] | None = None
) -> Float[Tensor, "groups members"]:
    """Return each reward minus the mean reward of the group's other rollouts. Pure. Local.

    The advantage of a reward r is n / (n - 1) (r - mean), with n unmasked members in the group. The
    mean of the other rollouts is an unbiased baseline. The advantage in a group of one member is 0.

    Source: arXiv:2402.14740 (RLOO).
    """
    rewards, mask = _checked(rewards, mask, dims=2)
    centred, _ = _centred(rewards, mask)
    count = mask.sum(dim=1, keepdim=True)
    return (centred * count / (count - 1).clamp(min=1)).to(rewards.dtype)


def max_rl_advantages(
    rewards: Float[Tensor, "groups members"], *, mask: Bool[Tensor, "groups members"] | None = None
) -> Float[Tensor, "groups members"]:
    """Return (r - mean) / mean of the group, or 0 if the mean is not above 0. Pure. Local.

    With rewards of 0 or 1, training increases the logarithm of a prompt's success rate instead of
    the success rate. Hard prompts therefore get larger weights.

    Args:
        rewards: not negative.

    Source: arXiv:2602.02710 (MaxRL).
    """
    rewards, mask = _checked(rewards, mask, dims=2)
    centred, _ = _centred(rewards, mask)
    mean = _means(rewards.double(), mask)
    found = torch.where(mean > 0, centred / mean.where(mean > 0, torch.ones_like(mean)), 0.0)
    return found.to(rewards.dtype)


def turn_advantages(
    rewards: Float[Tensor, "groups members turns"],
    *,
    mask: Bool[Tensor, "groups members turns"],
    discount: float = 1.0,
    normalise: bool = True,
    epsilon: float = 1e-4,
) -> Float[Tensor, "groups members turns"]:
    """Return how much better each turn is than the mean of its group at that turn. Pure. Local.

    A turn's return is its reward plus the discounted rewards of later turns. For each turn, the
    advantages of the returns are computed as in `group_advantages`, over the members that have the
    turn. Before the call, add a reward of the whole rollout to the reward of its last turn.

    Args:
        mask: True for the turns that a member has. A missing turn before other turns has reward 0.

    Raises:
        UsageError: `discount` is not within [0, 1].

    Source: arXiv:2505.11821 (turns have advantages of their own).
    """
    if not 0 <= discount <= 1:
        raise UsageError(f"discount must be between 0 and 1; got {discount}")
    rewards, mask = _checked(rewards, mask, dims=3)
    returns, after = [], torch.zeros_like(rewards[..., 0], dtype=torch.float64)
    for reward in reversed(rewards.unbind(-1)):
        after = reward + discount * after
        returns.append(after)
    stacked = torch.stack(returns[::-1], dim=-1) if returns else rewards
    centred, mean_square = _centred(stacked, mask)
    found = centred / (mean_square.sqrt() + epsilon) if normalise else centred
    return found.to(rewards.dtype)


def _checked(rewards: object, mask: object, *, dims: int) -> tuple[Tensor, Tensor]:
    if not isinstance(rewards, Tensor):
        raise ShapeError(f"rewards must be a torch.Tensor; got {type(rewards).__name__}")
    if rewards.ndim != dims or not rewards.is_floating_point() or not rewards.shape[1]:
        shape = "[groups, members]" if dims == 2 else "[groups, members, turns]"
        raise ShapeError(
            f"rewards must be floating {shape}; got {rewards.dtype} {list(rewards.shape)}. For a "
            "single group, pass rewards.float()[None]."
        )
    if mask is None:
        return rewards, torch.ones_like(rewards, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != rewards.shape:
        raise ShapeError(f"mask must be a bool tensor {list(rewards.shape)}, like the rewards")
    return torch.where(mask, rewards, torch.zeros_like(rewards)), mask


def _means(x: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, x, torch.zeros_like(x))
    return kept.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _centred(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return differences from the mean, 0 where masked, and the mean of their squares.

    Both are float64, and exactly 0 if all members are equal.
    """
    # Subtract a member first: a mean of equal numbers is rounded, and a mean of zeros is not.
    x = x.double()
    one = x.masked_fill(~mask, math.inf).amin(dim=1, keepdim=True)
    x = torch.where(mask, x - one, torch.zeros_like(x))
    centred = torch.where(mask, x - _means(x, mask), torch.zeros_like(x))
    return centred, _means(centred.square(), mask)
