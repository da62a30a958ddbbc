"""The reading end of a transport, opened in another process from its `spec()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UnsupportedError
from .board import open_store
from .carrier import Carrier, Wire, WireCarrier
from .commits import Commits
from .directory import FileTransport, SharedMemoryTransport
from .directory_commits import DirectoryCommits
from .group import GroupTransport
from .handles import HandleCarrier
from .packed_transport import PackedTransport
from .place import DiskPlace, private_place
from .process_wire import ProcessWire
from .store_commits import StoreCommits
from .transport import Transport

__all__ = ["open_commits", "open_transport"]


Wires = Mapping[str, Callable[[Mapping[str, Any]], Wire]]


def open_transport(spec: Mapping[str, Any], *, wires: Wires | None = None) -> Transport:
    """Open the reading end of the transport whose `spec()` this is.

    Args:
        wires: constructors of wires by their kind, from their `spec()`, beside "process".

    Raises:
        UnsupportedError: the kind is unknown here.
        TransferError: its store does not answer.
    """
    match spec:
        case {"kind": "shared_memory", "name": name, "root": root}:
            return SharedMemoryTransport(name, root=root)
        case {"kind": "file", "path": path, "user": user}:
            return FileTransport(path, user=user)
        case {"kind": "packed", "commits": commits, "carrier": carrier, "keep": keep}:
            return PackedTransport(open_commits(commits), _carrier(carrier, wires or {}), keep=keep)
        case {"kind": "group", "store": store, "trainers": trainers, **told}:
            given = {key: told[key] for key in ("readers", "generation", "keep")}
            return GroupTransport(store=open_store(store), trainers=trainers, **given)
    raise _unknown("transport", spec, "shared_memory, file, packed, group")


def open_commits(spec: Mapping[str, Any]) -> Commits:
    """Open the reading end of the commits whose `spec()` this is."""
    match spec:
        case {"kind": "directory", "name": name, "root": root, "prefix": prefix}:
            return DirectoryCommits(private_place(name, root, prefix=prefix), owner=False)
        case {"kind": "directory", "path": path, "user": user}:
            return DirectoryCommits(DiskPlace(Path(path), user=user), owner=False)
        case {"kind": "store", "name": name, "store": store}:
            return StoreCommits(open_store(store), name=name, owner=False)
    raise _unknown("commits", spec, "directory, store")


def _carrier(spec: Mapping[str, Any], wires: Wires) -> Carrier:
    match spec:
        case {"kind": "handles"}:
            return HandleCarrier()
        case {"kind": "wire", "wire": wire}:
            return WireCarrier(_wire(wire, wires))
    raise _unknown("carrier", spec, "handles, wire")


def _wire(spec: Mapping[str, Any], wires: Wires) -> Wire:
    kind = str(spec.get("kind"))
    if kind == "process":
        return ProcessWire()
    if kind in wires:
        return wires[kind](spec)
    raise _unknown("wire", spec, ", ".join(["process", *wires]))


def _unknown(what: str, spec: Mapping[str, Any], known: str) -> UnsupportedError:
    return UnsupportedError(f"no {what} for {dict(spec)}; known: {known}")
