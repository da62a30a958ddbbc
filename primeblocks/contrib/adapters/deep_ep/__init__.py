"""Dispatchers on DeepEP's two classes of buffers, for GPUs joined by NVLink and RDMA.

The dispatchers have never run on DeepEP. `elastic_dispatcher` uses `deep_ep.ElasticBuffer` (DeepEP
2), and `buffer_dispatcher` uses `deep_ep.Buffer` (DeepEP 1.2). Both functions return a
`TokenDispatcher`, which sends a token once to each rank that owns one of the token's experts. Both
functions import deep_ep when you call them.
"""

from .buffers import buffer_dispatcher, elastic_dispatcher
from .exchange import DeepEpDispatcher

__all__ = ["DeepEpDispatcher", "buffer_dispatcher", "elastic_dispatcher"]
