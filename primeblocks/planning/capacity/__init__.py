"""The number of GPUs that hold a batch of rollouts."""

from .kv_shapes import KvGroup, Rollouts, kv_groups
from .plan import CapacityPlan, Gpu, KvTier, Recompute, Weights, plan_capacity

__all__ = [
    "CapacityPlan",
    "Gpu",
    "KvGroup",
    "KvTier",
    "Recompute",
    "Rollouts",
    "Weights",
    "kv_groups",
    "plan_capacity",
]
