"""Replay an engine's selection of tokens, for sparse attention with an indexer (DSA).

`record` stores a model's selection as `Indices`, which you can slice, join and pack without loss.
`impose` makes the indexers of another model select the same tokens. `compare` measures the
agreement of two selections.
"""

from .hooks import Indexer, IndexTape, impose, record
from .values import IndexAgreement, Indices, compare

__all__ = ["IndexAgreement", "IndexTape", "Indexer", "Indices", "compare", "impose", "record"]
