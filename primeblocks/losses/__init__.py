"""Losses of reinforcement learning, corrected for tokens of older policies: pure functions.

Every loss is a sum over tokens with counts (`TokenLoss`), takes `weights` of any of `corrections`,
and is divided once by what all ranks and micro-batches count (`normalisation`). `logprobs` has what
losses want without a matrix of logits.
"""

from . import advantages, corrections, distillation, logprobs, normalisation
from .kl import kl_loss
from .policy_gradient import (
    aipo_loss,
    cispo_loss,
    dppo_loss,
    dro_loss,
    grpo_loss,
    sapo_loss,
)
from .sequence_level import gmpo_loss, gspo_loss
from .tokens import TokenLoss

__all__ = [
    "TokenLoss",
    "advantages",
    "aipo_loss",
    "cispo_loss",
    "corrections",
    "distillation",
    "dppo_loss",
    "dro_loss",
    "gmpo_loss",
    "grpo_loss",
    "gspo_loss",
    "kl_loss",
    "logprobs",
    "normalisation",
    "sapo_loss",
]
