"""Rules other than top-k to select tokens for sparse attention, and a loss that trains an indexer.

Pass a selector of pools, tiles or compressed entries as `selector=` to `select` of
`parallel.attention.dsa`. The module `entries` pools or compresses windows of tokens into entries.
"""

from . import entries
from .loss import indexer_loss
from .selectors import TopEntries, TopPools, TopTiles, all_entries

__all__ = ["TopEntries", "TopPools", "TopTiles", "all_entries", "entries", "indexer_loss"]
