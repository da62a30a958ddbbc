"""Losses of reinforcement learning, corrected for tokens of older policies: pure functions."""

from .corrections import group_advantages, importance_weights
from .policy_gradient import TokenLoss, aipo_loss, grpo_loss

__all__ = ["TokenLoss", "aipo_loss", "group_advantages", "grpo_loss", "importance_weights"]
