"""The checkpoint and the transport for several nodes, which share neither memory nor files."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from primeblocks import weightsync
from primeblocks.weightsync.transports import PullTransport, TcpWire, Transport

TIMEOUT_S = 60.0
LEASE_S = 20.0  # A publish waits so long for an engine that died while it read.


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files, to send them. The model is tiny."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def checkpoint_on_all(folder: Path, make: Callable[[Path], object]) -> None:
    """Have rank 0 make a checkpoint, and the others get it by message. Collective."""
    files: list[dict[str, bytes]] = [{}]
    if dist.get_rank() == 0:
        make(folder)
        files = [files_of(folder)]
    dist.broadcast_object_list(files, src=0)
    write_files(folder, files[0])


def transport_between_ranks() -> Transport:
    """Return shared memory if torchrun has all ranks on one node, or a transport over TCP."""
    is_first, master = dist.get_rank() == 0, os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        name = f"demo-{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}-{port}"
        return weightsync.SharedMemoryTransport(name, owner=is_first)
    return transport_over_tcp(master, port, host=address_towards(master, port), owner=is_first)


def transport_over_tcp(store_host: str, store_port: int, *, host: str, owner: bool) -> Transport:
    """Return this rank's transport, which readers find through the store. `host` is this node's."""
    store = dist.TCPStore(
        store_host, store_port, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
    )
    return PullTransport(store, TcpWire(host), owner=owner, lease_s=LEASE_S)


def address_towards(host: str, port: int) -> str:
    """This node's own address on the way to another one. Nothing is sent."""
    family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as link:
        link.connect(there)
        return link.getsockname()[0]
