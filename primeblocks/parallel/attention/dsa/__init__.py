"""Attention to selected rows (DSA and its relatives) over a sequence that ranks share.

`dsa_attention` does all of it; its parts are functions too: `gather_tokens`, `select`,
`sparse_attention`. Which rows a query sees is data, a selector; who computes is an engine.
"""

from . import plan
from .attention import dsa_attention, sparse_attention
from .gather import gather_tokens
from .indexer import IndexerInputs, IndexScores, Selector, TopK, index_scores, keep_indices, select
from .kernel import ReferenceKernel, Rows, SparseKernel

__all__ = [
    "IndexScores",
    "IndexerInputs",
    "ReferenceKernel",
    "Rows",
    "Selector",
    "SparseKernel",
    "TopK",
    "dsa_attention",
    "gather_tokens",
    "index_scores",
    "keep_indices",
    "plan",
    "select",
    "sparse_attention",
]
