"""Transports by their arguments, and the reading end of one from its `spec()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...errors import UnsupportedError
from .board import file_store, tcp_store
from .carriers import Carrier, HandleCarrier, Wire, WireCarrier
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
# A spec is a kind and the arguments of its constructor, of which some are specs.
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
_OWNERS = {"owner", "rank"}  # Arguments of the other ends.


def IpcTransport(
    name: str,
    *,
    owner: bool = False,
    wire: Wire | None = None,
    device: torch.device | str = "cpu",
    keep: bool = False,
    root: str = "/dev/shm",
) -> PackedTransport:
    """Return packed buffers found through a directory: one host, one user.

    Engines read them where they lie, or over a wire. An engine's death ends its hold. Markers and
    notes are small files in a directory that only this user can read, with the promises of
    `SharedMemoryTransport` about it.

    On a GPU, close engines' ends before the trainer's: their memory is the trainer's. On a
    GPU it has run with one trainer and one engine process; with CPU tensors everything except the
    handles is the same.

    Args:
        name: one word that trainer and engines agree on.
        owner: true on trainer rank 0, and there only.
        wire: this process's. None gives engines handles of memory: memfd, or CUDA IPC.
        device: the device on which this trainer rank packs.
        keep: as in `PackedTransport`.
        root: the parent of the directory, on a tmpfs.

    Raises:
        UnsupportedError: this is not Linux, `root` does not exist, or the device cannot be used.
        UsageError: `name` is not one path component, or has a living owner; or others may rename
            what is in `root`.
    """
    carrier = _carrier(wire, device)
    place = PrivatePlace(name, root, prefix="primeblocks-ipc")
    return PackedTransport(DirectoryCommits(place, owner=owner), carrier, keep=keep)


def PullTransport(
    store: dist.Store,
    wire: Wire | None = None,
    *,
    name: str = "policy",
    owner: bool = False,
    device: torch.device | str = "cpu",
    keep: bool = False,
    lease_s: float = 60.0,
    timeout_s: float = 60.0,
) -> PackedTransport:
    """Return packed buffers found through a store: engines fetch them over a wire, from any host.

    Buffers are registered once. An engine owns the bytes that it has fetched; it has `lease_s` to
    fetch one version. A restarted trainer starts with no version.

    Args:
        store: the same for all; one that outlives the ranks.
        wire: this process's. It is closed with the transport. None gives engines handles of memory,
            on one host.
        name: names this policy, where several share the store.
        owner: true on trainer rank 0, and there only.
        device: the device of this process's buffers.
        keep: as in `PackedTransport`.
        lease_s: the time that an engine has to fetch one version; the owner's value counts.
        timeout_s: for the construction.

    Raises:
        TransferError: the store does not answer.
    """
    commits = StoreCommits(store, name=name, owner=owner, lease_s=lease_s, timeout_s=timeout_s)
    return PackedTransport(commits, _carrier(wire, device), keep=keep)


def _carrier(wire: Wire | None, device: torch.device | str) -> Carrier:
    if wire is None:
        return HandleCarrier(device=device)
    return WireCarrier(wire, device=device)


def open_transport(spec: Mapping[str, Any], *, wires: Wires | None = None) -> Transport:
    """Open the reading end of the transport whose `spec()` this is.

    Args:
        wires: constructors of wires by their kind, beside "tcp", with what their
            `spec()` says.

    Raises:
        UnsupportedError: the kind is unknown here.
        TransferError: its store does not answer.
    """
    made = open_spec(spec, wires=wires)
    if not isinstance(made, Transport):
        raise UnsupportedError(f"no transport for {dict(spec)}, which is a part of one")
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
        raise UnsupportedError(f"no transport for {dict(spec)}; known: {', '.join(kinds)}")
    return make(**told)
