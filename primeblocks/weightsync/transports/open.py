"""The reading end of a transport, opened in another process from its `spec()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedError
from .directory import FileTransport, SharedMemoryTransport
from .ipc import IpcTransport
from .transport import Transport

__all__ = ["open_transport"]


def open_transport(spec: Mapping[str, Any]) -> Transport:
    """Open the reading end of the transport whose `spec()` this is.

    Raises:
        UnsupportedError: the kind is unknown here.
    """
    match spec:
        case {"kind": "shared_memory", "name": name, "root": root}:
            return SharedMemoryTransport(name, root=root)
        case {"kind": "file", "path": path, "user": user}:
            return FileTransport(path, user=user)
        case {"kind": "ipc", "name": name, "root": root, "keep": keep}:
            return IpcTransport(name, root=root, keep=keep)
    raise UnsupportedError(f"no transport for {dict(spec)}; known: shared_memory, file, ipc")
