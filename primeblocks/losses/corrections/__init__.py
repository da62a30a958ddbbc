"""Weights that correct for tokens sampled by another policy than the one that learns.

Each function returns a `Correction`: weights per token without gradient, for the `weights=` of any
loss, with counts and the effective sample size. To combine corrections, multiply their weights:
`a.weights * b.weights`. r is a token's ratio p_trainer / p_rollout, or p_old / p_rollout if the
loss itself compares with an old policy. Masked tokens may hold any values. A ratio counts as at
most e**20. A NaN of an unmasked token shows in its weight, or masks it.
"""

from .masks import (
    advantage_mask,
    clip_cov_mask,
    entropy_scaled_mask,
    kl_cov_tokens,
    second_moment_mask,
    sequence_outlier_mask,
)
from .weights import (
    Correction,
    effective_sample_size,
    importance_weights,
    off_policy_metrics,
)

__all__ = [
    "Correction",
    "advantage_mask",
    "clip_cov_mask",
    "effective_sample_size",
    "entropy_scaled_mask",
    "importance_weights",
    "kl_cov_tokens",
    "off_policy_metrics",
    "second_moment_mask",
    "sequence_outlier_mask",
]
