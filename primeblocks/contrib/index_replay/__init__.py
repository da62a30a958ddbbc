"""Replay an engine's selection of tokens: sparse attention with an indexer (DSA).

`record` writes a selection down, `Indices` carries it (sliced, joined, packed for the wire without
loss), and `impose` makes another model's indexers select the same. `compare` says how far two
selections agree.
"""

from .agreement import IndexAgreement, compare
from .hooks import Indexer, IndexTape, impose, record
from .values import Indices

__all__ = ["IndexAgreement", "IndexTape", "Indexer", "Indices", "compare", "impose", "record"]
