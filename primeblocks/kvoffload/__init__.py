"""Keep the attention keys and values of past rollouts outside the engine.

`TieredStore` holds pages in host memory, on disk and in stores that engines share:
content-addressed, checksummed, within a quota, and aware of policy versions. Loading gives the page
that was saved or a miss, never a wrong page.

The files, in the order in which they are read:

- `page`, `tier`, `host`: a page's key and checksum, what a tier is, and host memory.
- `store`: the calls. Each takes the store's lock, changes the catalogue, and hands out its moves.
- `pending`, `moves`: what a caller hands over, its result, and one step of a page between tiers.
- `catalogue`, `lower`: the place of each page, and what a lower tier is given. No threads, no I/O.
- `copier`, `worker`: the threads that make the moves, and report them to the catalogue.
- `disk`, `evict`, `adapters`: a tier, the choice of the page that leaves, and engines.
"""

from . import evict
from .disk import DiskTier
from .host import HostTier
from .page import PageKey, page_hashes
from .pending import Pending
from .store import TieredStore, load_prefix
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
