"""DeepEP: dispatchers on its two buffers, for GPUs joined by NVLink and RDMA.

`ElasticDispatcher` runs on `deep_ep.ElasticBuffer` (DeepEP 2), `BufferDispatcher` on
`deep_ep.Buffer` (DeepEP 1.2). Both satisfy `TokenDispatcher`, and both send a token once to each
rank that owns one of its experts. deep_ep itself is imported when a dispatcher is built.
"""

from .elastic import ElasticDispatcher
from .legacy import BufferDispatcher

__all__ = ["BufferDispatcher", "ElasticDispatcher"]
