"""Keep the attention keys and values of past rollouts outside the engine.

`TieredStore` holds pages in host memory and on disk: content-addressed, checksummed, within a
quota, and aware of policy versions. Loading gives the page that was saved or a miss, never a wrong
page. Plans of capacity and remote stores are not here yet.
"""

from .disk import DiskTier
from .evict import Candidate, Choice, Evict, VersionAware, lru
from .host import HostTier
from .page import PageKey
from .pending import Pending
from .reference import ReferenceStore
from .tier import Loaded, Saved, Tier, TierStatistics
from .tiers import TieredStore

__all__ = [
    "Candidate",
    "Choice",
    "DiskTier",
    "Evict",
    "HostTier",
    "Loaded",
    "PageKey",
    "Pending",
    "ReferenceStore",
    "Saved",
    "Tier",
    "TierStatistics",
    "TieredStore",
    "VersionAware",
    "lru",
]
