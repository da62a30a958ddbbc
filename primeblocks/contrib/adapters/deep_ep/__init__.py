"""Dispatchers on DeepEP's two buffers, for GPUs joined by NVLink and RDMA. Never run on DeepEP.

`elastic_dispatcher` uses `deep_ep.ElasticBuffer` (DeepEP 2), and `buffer_dispatcher` uses
`deep_ep.Buffer` (DeepEP 1.2). Both return a `TokenDispatcher` that sends a token once to each rank
that owns one of its experts. Building a dispatcher imports deep_ep.
"""

from .elastic import elastic_dispatcher
from .exchange import DeepEpDispatcher
from .legacy import buffer_dispatcher

__all__ = ["DeepEpDispatcher", "buffer_dispatcher", "elastic_dispatcher"]
