"""Keep the attention keys and values of past rollouts outside the engine.

`TieredStore` holds pages in host memory, on disk and in stores that engines share. Pages are
content-addressed and checksummed. The store respects quotas, and can evict pages of old policy
versions first. A load returns the saved page or a miss, but never a wrong page.

The files, in reading order:

- `page`, `tier`: a page's key and checksum, the interface of a tier, and host memory.
- `store`: the calls. Each call takes the store's lock, changes the catalogue, and hands the
  resulting moves to the threads.
- `pending`, `moves`: a call in progress with its result, and one step of a page between tiers.
- `catalogue`, `lower`: the place of each page, and the choice of pages for lower tiers, without
  threads and without I/O.
- `copier`, `worker`: the threads that move pages, and report finished moves to the catalogue.
- `disk`, `evict`, `adapters`: a tier on a disk, the choice of the page to evict, and adapters to
  engines.
"""

from . import evict
from .disk import DiskTier
from .page import PageKey, page_hashes
from .pending import Pending
from .store import TieredStore, load_prefix
from .tier import Found, HostTier, Loaded, Record, Saved, Tier, TierStatistics

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
