"""Losses of reinforcement learning, with corrections for tokens of older policies. Pure functions.

Every loss function returns a `TokenLoss`, which contains a sum over tokens, and counts of tokens
and sequences. Every loss function accepts the `weights` of any correction. `normalisation` divides
the sums of losses by one count over all ranks and micro-batches. `logprobs` computes the inputs of
losses without storing all logits.
"""

from . import advantages, corrections, distillation, logprobs, normalisation
from .distillation import kl_loss
from .policy_gradient import (
    aipo_loss,
    cispo_loss,
    dppo_loss,
    dro_loss,
    gmpo_loss,
    grpo_loss,
    gspo_loss,
    sapo_loss,
)
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
