"""The reading end of a transport, opened in another process from its `spec()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UnsupportedError
from .board import file_store, tcp_store
from .carriers import HandleCarrier, Wire, WireCarrier
from .directory import FileTransport, SharedMemoryTransport
from .directory_commits import DirectoryCommits
from .group import GroupTransport
from .packed_transport import PackedTransport
from .place import DiskPlace, PrivatePlace
from .store_commits import StoreCommits
from .tcp_wire import TcpWire
from .transport import Transport

__all__ = ["open_spec", "open_transport"]

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
