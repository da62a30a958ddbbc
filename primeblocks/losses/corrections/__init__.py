"""Weights that correct for tokens sampled by another policy than the one that learns.

Each function returns a `Correction`: weights, one a token and without gradient, for the `weights=`
of any loss, with counts and the effective sample size. Weights of several multiply:
`a.weights * b.weights`. r is the ratio p_trainer / p_rollout of a token, or p_old / p_rollout
where the loss itself compares with an old policy. Masked tokens may hold anything. A ratio counts
as e**20 at most; a NaN of a token that the mask keeps shows in its weight, or masks it.
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
