"""DeepEP: dispatchers on its two buffers, for GPUs joined by NVLink and RDMA.

`elastic_dispatcher` builds one on `deep_ep.ElasticBuffer` (DeepEP 2), `buffer_dispatcher` on
`deep_ep.Buffer` (DeepEP 1.2). Both satisfy `TokenDispatcher`, and both send a token once to each
rank that owns one of its experts. deep_ep itself is imported when a dispatcher is built.
"""

from .elastic import elastic_dispatcher
from .exchange import DeepEpDispatcher
from .legacy import buffer_dispatcher

__all__ = ["DeepEpDispatcher", "buffer_dispatcher", "elastic_dispatcher"]
