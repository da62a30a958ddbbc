"""Keep the attention keys and values of past rollouts outside the engine.

`TieredStore` holds pages in host memory, on disk and in stores that engines share:
content-addressed, checksummed, within a quota, and aware of policy versions. Loading gives the page
that was saved or a miss, never a wrong page. `capacity.plan_capacity` says how many GPUs
hold a batch of rollouts.
"""

from . import evict
from .disk import DiskTier
from .host import HostTier
from .page import PageKey
from .pending import Pending
from .prefix import load_prefix, page_hashes
from .store import TieredStore
from .tier import Found, Loaded, Record, Saved, Tier, TierStatistics

__all__ = [
    "DiskTier",
    "Found",
    "HostTier",
    "Loaded",
    "PageKey",
    "Pending",
    "Record",
    "Saved",
    "Tier",
    "TierStatistics",
    "TieredStore",
    "evict",
    "load_prefix",
    "page_hashes",
]
