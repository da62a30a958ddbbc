"""Attention to selected rows, such as DeepSeek sparse attention (DSA), over split sequences.

`dsa_attention` gathers rows, selects rows and computes attention in one call. The functions
`gather_tokens`, `select` and `sparse_attention` are the separate steps of `dsa_attention`. A
selector such as `TopK` chooses the rows that a query sees. A `SparseKernel` computes attention to
the chosen rows.
"""

from .attention import dsa_attention, sparse_attention
from .gather import gather_tokens
from .indexer import IndexerInputs, TopK, index_scores, keep_indices, select
from .kernel import ReferenceKernel, Rows, SparseKernel

__all__ = [
    "IndexerInputs",
    "ReferenceKernel",
    "Rows",
    "SparseKernel",
    "TopK",
    "dsa_attention",
    "gather_tokens",
    "index_scores",
    "keep_indices",
    "select",
    "sparse_attention",
]
