"""A tier in Mooncake Store, which engines on several machines share.

    host = HostTier(capacity_bytes=..., page_bytes=...)
    client = connect("10.0.0.1:50051", hostname="10.0.0.7", segment_bytes=64 << 30, protocol="rdma")
    store = TieredStore([host, MooncakeTier(client, host, namespace="glm-5")])

A page that one engine wrote is found by all that use the same namespace and keys. Mooncake moves
bytes between our host slab and the memory of other machines, without a copy between; its master
decides what is evicted.

Written to the source of Mooncake 0.3.13 (store_py.cpp, real_client.cpp and types.h), and run with
it: a master and clients over TCP on one machine without CUDA, from the wheel
`mooncake-transfer-engine-non-cuda`. RDMA was not run. Only `connect` imports Mooncake.
"""

from .connect import connect
from .tier import MooncakeTier

__all__ = ["MooncakeTier", "connect"]
