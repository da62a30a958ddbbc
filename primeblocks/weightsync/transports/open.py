"""`IpcTransport` and `PullTransport`, and the reading end of any transport from its `spec()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...errors import UnsupportedError
from .board import file_store, tcp_store
from .carriers import HandleCarrier, Wire, WireCarrier
from .directory import FileTransport, SharedMemoryTransport
from .directory_commits import DirectoryCommits
from .group import GroupTransport
from .packed import PackedTransport
from .place import DiskPlace, PrivatePlace
from .store_commits import StoreCommits
from .tcp_wire import TcpWire
from .transport import Transport

__all__ = ["IpcTransport", "PullTransport", "open_spec", "open_transport"]

Wires = Mapping[str, Callable[..., Wire]]
# A spec has a kind, and the arguments of that kind's constructor. Some arguments are specs.
_KINDS: Mapping[str, Callable[..., Any]] = {
    "shared_memory": SharedMemoryTransport,
    "file": FileTransport,
    "packed": PackedTransport,
    "group": GroupTransport,
    "directory": DirectoryCommits,
    "private": PrivatePlace,
    "disk": DiskPlace,
    "store": StoreCommits,
    "file_store": file_store,
    "tcp_store": tcp_store,
    "handles": HandleCarrier,
    "wire": WireCarrier,
    "tcp": TcpWire,
}
_OWNERS = {"owner", "rank"}  # Arguments that only trainer ranks pass.


def IpcTransport(
    name: str,
    *,
    owner: bool = False,
    device: torch.device | str = "cpu",
    keep: bool = False,
    root: str = "/dev/shm",
) -> PackedTransport:
    """Return a transport of packed buffers, on one machine and for one user.

    Engines read the buffers in place, through CUDA IPC or a memfd. If an engine dies, the versions
    that it used are released. Commit markers and handles of buffers are stored in small files, in a
    directory that only this user can read.

    On a GPU, close the transports of the engines before the transport of the trainer, because
    engines use the trainer's memory. On a GPU, this transport has run only with one trainer process
    and one engine process. The code for CPU and GPU tensors is the same, except for the handles of
    buffers.

    Args:
        name: one word that trainer and engines agree on.
        owner: true only on trainer rank 0.
        device: the device on which this trainer rank packs full versions. "cuda" is the current
            device of this thread.
        keep: as for `PackedTransport`.
        root: the parent of the directory, on a tmpfs.

    Raises:
        UnsupportedError: this is not Linux, `root` does not exist, or the device cannot be used.
        UsageError: `name` is not one path component, or has a living owner, or other users may
            rename the files in `root`.
    """
    carrier = HandleCarrier(device=device)
    place = PrivatePlace(name, root, prefix="primeblocks-ipc")
    return PackedTransport(DirectoryCommits(place, owner=owner), carrier, keep=keep)


def PullTransport(
    store: dist.Store,
    wire: Wire,
    *,
    name: str = "policy",
    owner: bool = False,
    device: torch.device | str = "cpu",
    keep: bool = False,
    lease_s: float = 60.0,
    timeout_s: float = 60.0,
) -> PackedTransport:
    """Return a transport of packed buffers, which engines on any machine fetch over a wire.

    Processes find each other through `store`. Each buffer is registered with the wire only once. An
    engine owns a copy of the bytes that it has fetched. A restarted trainer starts without
    versions.

    Args:
        store: the same store for all processes. The store must stay available until all ranks have
            ended.
        wire: this process's wire, which is closed with the transport.
        name: the name of this policy, if several policies share the store.
        owner: true only on trainer rank 0.
        device: the device of this process's buffers of full versions. "cuda" is the current device
            of this thread.
        keep: as for `PackedTransport`.
        lease_s: how long an engine may take to fetch one version, a finite number above 0. Only
            the value that the owner passes is used.
        timeout_s: how long the construction waits for the store.

    Raises:
        UnsupportedError: torch does not see the GPU of `device`.
        TransferError: the store does not answer.
        UsageError: `lease_s` is not a finite number above 0.
    """
    carrier = WireCarrier(wire, device=device)
    commits = StoreCommits(store, name=name, owner=owner, lease_s=lease_s, timeout_s=timeout_s)
    return PackedTransport(commits, carrier, keep=keep)


def open_transport(spec: Mapping[str, Any], *, wires: Wires | None = None) -> Transport:
    """Open the reading end of the transport that `spec` describes.

    Args:
        spec: the result of `transport.spec()` in another process.
        wires: a constructor for each kind of wire, except for "tcp". The constructor gets the
            entries of the wire's `spec()`, without `kind`.

    Raises:
        UnsupportedError: the kind is unknown.
        TransferError: the transport's store does not answer.
    """
    made = open_spec(spec, wires=wires)
    if not isinstance(made, Transport):
        raise UnsupportedError(
            f"open_transport() got the spec of a part of a transport: {dict(spec)}. Pass "
            "transport.spec()."
        )
    return made


def open_spec(spec: Mapping[str, Any], *, wires: Wires | None = None) -> Any:
    """Open the reading end of a transport, or of a part of one."""
    kinds = {**_KINDS, **(wires or {})}
    told = {
        name: open_spec(value, wires=wires) if isinstance(value, Mapping) else value
        for name, value in spec.items()
        if name != "kind"
    }
    try:
        make = kinds[str(spec.get("kind"))]
        inspect.signature(make).bind(**told)
    except (KeyError, TypeError):
        make = None
    if make is None or told.keys() & _OWNERS:
        raise UnsupportedError(
            f"no transport has the spec {dict(spec)}. Known kinds are {', '.join(kinds)}. Pass "
            "transport.spec() of the same release, and wires= for other wires."
        )
    return make(**told)
