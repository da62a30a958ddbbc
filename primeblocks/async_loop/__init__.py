"""Reinforcement learning in which generation never waits for training.

Made of rollouts that know the policy version of every token, a buffer with bounded capacity and
bounded staleness, a loop that generates, trains and publishes at the same time, and losses
corrected for off-policy tokens.
"""

from .buffer import RolloutBuffer
from .correction import group_advantages, importance_weights
from .loop import AsyncLoop, Step
from .losses import TokenLoss, aipo_loss, grpo_loss
from .rollout import Group, Rollout, versions_from_spans
from .scheduler import AdaptiveLimit, Admission, LeastLoaded, Retries
from .staleness import StalenessPolicy, cache_salt, staleness

__all__ = [
    "AdaptiveLimit",
    "Admission",
    "AsyncLoop",
    "Group",
    "LeastLoaded",
    "Retries",
    "Rollout",
    "RolloutBuffer",
    "StalenessPolicy",
    "Step",
    "TokenLoss",
    "aipo_loss",
    "cache_salt",
    "group_advantages",
    "grpo_loss",
    "importance_weights",
    "staleness",
    "versions_from_spans",
]
