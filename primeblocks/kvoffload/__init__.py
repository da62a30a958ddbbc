"""Keep the attention keys and values of past rollouts outside the engine.

`TieredStore` holds pages in host memory, on disk and in stores that engines share:
content-addressed, checksummed, within a quota, and aware of policy versions. Loading gives the page
that was saved or a miss, never a wrong page. `plan_capacity` says how many GPUs hold a batch of
rollouts.
"""

from .arc import arc
from .capacity import plan_capacity
from .capacity_plan import CapacityPlan, Gpu, KvTier, Recompute, Weights
from .disk import DiskTier
from .evict import Candidate, Choice, Evict, Live, Snapshot, VersionAware, lru
from .footprint import Rollouts
from .host import HostTier
from .kv_shapes import KvGroup, kv_groups
from .page import PageKey
from .pending import Pending
from .reference import ReferenceStore
from .tier import Found, Loaded, Record, Saved, Tier, TierStatistics
from .tiers import TieredStore

__all__ = [
    "Candidate",
    "CapacityPlan",
    "Choice",
    "DiskTier",
    "Evict",
    "Found",
    "Gpu",
    "HostTier",
    "KvGroup",
    "KvTier",
    "Live",
    "Loaded",
    "PageKey",
    "Pending",
    "Recompute",
    "Record",
    "ReferenceStore",
    "Rollouts",
    "Saved",
    "Snapshot",
    "Tier",
    "TierStatistics",
    "TieredStore",
    "VersionAware",
    "Weights",
    "arc",
    "kv_groups",
    "lru",
    "plan_capacity",
]
