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

from __future__ import annotations

import socket
from typing import Any

from ....errors import DeadlineError, EngineError, MissingPackageError, PlanError
from .tier import MooncakeTier

__all__ = ["MooncakeTier", "connect"]


def connect(
    master: str,
    *,
    hostname: str,
    segment_bytes: int = 0,
    buffer_bytes: int = 16 << 20,
    protocol: str = "tcp",
    devices: str = "",
    metadata: str = "P2PHANDSHAKE",
    timeout_s: float = 10.0,
) -> Any:
    """Join a Mooncake Store. Local, but for the connection.

    Args:
        master: host and port of the master's RPC server.
        hostname: name under which other clients reach this machine.
        segment_bytes: memory of this process that holds pages for everybody: 0, or 16 MiB and more.
        buffer_bytes: Mooncake's own buffer, for values that it reads from a disk.
        protocol: "tcp" or "rdma".
        devices: RDMA devices, separated by commas.
        metadata: Mooncake's metadata server; the default needs none.
        timeout_s: limit for reaching the master. Without a master, Mooncake's own setup would
            block the whole interpreter for 90 s (measured, 0.3.13).

    Raises:
        MissingPackageError: Mooncake, or a library that it links, is not installed.
        PlanError: `master` is not host:port.
        DeadlineError: nobody answers at `master`.
        EngineError: nobody listens there, or Mooncake refuses to set the client up.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        remedy = (
            "Run: pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda on a "
            f"machine without CUDA; both link libibverbs.so.1 (apt install libibverbs1). {error}"
        )
        raise MissingPackageError("mooncake", remedy=remedy) from error
    _reach(master, timeout_s)
    client = MooncakeDistributedStore()
    code = client.setup(hostname, metadata, segment_bytes, buffer_bytes, protocol, devices, master)
    if code:
        raise EngineError(
            f"Mooncake refused a client of {master} on {hostname} over {protocol} with "
            f"{segment_bytes} bytes for others: {code}. Its log on stderr says why."
        )
    return client


def _reach(master: str, timeout_s: float) -> None:
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        raise PlanError(f"the master of a Mooncake Store is host:port; got {master!r}")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except TimeoutError as error:
        raise DeadlineError(f"no Mooncake master answers at {master} in {timeout_s} s") from error
    except OSError as error:
        raise EngineError(f"no Mooncake master listens at {master}: {error}") from error
