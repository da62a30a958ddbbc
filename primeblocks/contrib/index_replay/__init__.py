"""Replay an engine's selection of tokens: sparse attention with an indexer (DSA).

`record` stores a selection, and `Indices` holds it. You can slice, join and pack `Indices` without
loss. `impose` makes another model's indexers select the same. `compare` measures the agreement of
two selections.
"""

from .agreement import IndexAgreement, compare
from .hooks import Indexer, IndexTape, impose, record
from .values import Indices

__all__ = ["IndexAgreement", "IndexTape", "Indexer", "Indices", "compare", "impose", "record"]
