"""Rules of sparse attention beyond the k best tokens: pools, tiles, and compressed entries.

Pass a selector as `selector=` to `select` of `parallel.attention.dsa`. The module `entries` makes
the rows of pools and windows.
"""

from . import entries
from .selectors import TopEntries, TopPools, TopTiles, all_entries

__all__ = ["TopEntries", "TopPools", "TopTiles", "all_entries", "entries"]
