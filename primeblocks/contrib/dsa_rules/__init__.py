"""Rules of sparse attention beyond the k best tokens, and the loss that trains an indexer.

Pass a selector of pools, tiles or compressed entries as `selector=` to `select` of
`parallel.attention.dsa`. The module `entries` makes the rows of pools and windows.
"""

from . import entries
from .loss import indexer_loss
from .selectors import TopEntries, TopPools, TopTiles, all_entries

__all__ = ["TopEntries", "TopPools", "TopTiles", "all_entries", "entries", "indexer_loss"]
