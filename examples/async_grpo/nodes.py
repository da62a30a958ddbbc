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


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in a folder, by file name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def checkpoint_on_all(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a checkpoint on rank 0, and send its files to all ranks. Collective."""
    files: list[dict[str, bytes]] = [{}]
    if dist.get_rank() == 0:
        make(folder)
        files = [files_of(folder)]
    dist.broadcast_object_list(files, src=0)
    write_files(folder, files[0])


def transport_between_ranks() -> Transport:
    """Return a transport over shared memory if all ranks are on one node, and else over TCP."""
    is_first, master = dist.get_rank() == 0, os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        name = f"demo-{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}-{port}"
        return weightsync.SharedMemoryTransport(name, owner=is_first)
    return transport_over_tcp(master, port, host=address_towards(master, port), owner=is_first)


def transport_over_tcp(store_host: str, store_port: int, *, host: str, owner: bool) -> Transport:
    """Return this rank's transport over TCP. `host` is the address of this rank's node."""
    store = dist.TCPStore(
        store_host, store_port, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
    )
    return PullTransport(store, TcpWire(host), owner=owner)


def address_towards(host: str, port: int) -> str:
    """Return the local address from which this node reaches `host`. Sends no data."""
    family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as link:
        link.connect(there)
        return link.getsockname()[0]
