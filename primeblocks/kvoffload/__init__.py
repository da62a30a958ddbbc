"""Keep the attention keys and values of past rollouts outside the engine.

`TieredStore` holds pages in host memory, on disk and in stores that engines share:
content-addressed, checksummed, within a quota, and aware of policy versions. Loading gives the page
that was saved or a miss, never a wrong page. `plan_capacity` says how many GPUs hold a batch of
rollouts.
"""

from .capacity.footprint import Rollouts
from .capacity.kv_shapes import KvGroup, kv_groups
from .capacity.plan import CapacityPlan, Gpu, KvTier, Recompute, Weights
from .capacity.planner import plan_capacity
from .disk import DiskTier, System
from .eviction.arc import arc
from .eviction.evict import Candidate, Choice, Evict, Live, Snapshot, VersionAware, lru
from .host import HostTier
from .page import PageKey
from .reference import ReferenceStore
from .store.pending import Pending
from .store.tiered import TieredStore
from .tier import Found, Loaded, Record, Saved, Tier, TierStatistics

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
    "System",
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
