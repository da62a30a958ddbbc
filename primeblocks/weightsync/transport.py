"""Where the blob of a version lies: in shared memory, or in a directory on a disk."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtyping import UInt8
from torch import Tensor

from ..errors import UnsupportedError, UsageError
from .marker import Marker
from .slots import Lease, Slots

__all__ = ["FileTransport", "SharedMemoryTransport", "Transport", "open_transport"]


@runtime_checkable
class Transport(Protocol):
    """Carries one blob a version from many writers to many readers.

    The owner (trainer rank 0) allocates and commits, every trainer rank writes its part, readers
    see committed versions only. The last committed version stays readable at any time, and what
    a reader holds stays unchanged until it lets go.
    """

    def spec(self) -> dict[str, Any]:
        """What `open_transport` needs to read along in another process. JSON-able."""
        ...

    def begin(self, version: int, *, size_bytes: int) -> str:
        """Owner: allocate the blob of a version nobody sees yet; returns the owner's `run`.

        Raises:
            CapacityError: there is no room.
        """
        ...

    def writable(self, version: int, *, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Writer: the begun blob, to be written to in place."""
        ...

    def flush(self, version: int) -> None:
        """Writer: return when what was written is as safe as the transport promises."""
        ...

    def commit(self, marker: Marker) -> None:
        """Owner: make a version visible, atomically. The one before stays readable."""
        ...

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed; else nothing."""
        ...

    def markers(self) -> tuple[Marker, ...]:
        """Reader: the committed versions that can be read, oldest first."""
        ...

    def lease(self, marker: Marker) -> Lease:
        """Reader: hold a committed version.

        Raises:
            TransferError: it was retired meanwhile.
            CorruptionError: it has the wrong size.
        """
        ...

    def close(self) -> None:
        """Let go. The owner removes everything; twice is fine."""
        ...


class SharedMemoryTransport(Slots):
    """Blobs in /dev/shm, which every rank writes in place: one host, no disk.

    Two slots take turns. The owner clears what a dead owner of the same name left behind, and
    removes everything at close or at the end of its process.

    Args:
        name: one word that trainer and engine agree on.
        owner: true on trainer rank 0, and there only.
        root: where tmpfs is mounted.

    Raises:
        UnsupportedError: this is not Linux, or `root` does not exist.
        UsageError: `name` is not one path component, or has a living owner.
    """

    def __init__(self, name: str, *, owner: bool = False, root: str = "/dev/shm") -> None:
        if not sys.platform.startswith("linux"):
            raise UnsupportedError(
                f"files in shared memory need Linux; this is {sys.platform}. Use FileTransport."
            )
        if not Path(root).is_dir():
            raise UnsupportedError(f"{root} is no directory. Mount a tmpfs, or use FileTransport.")
        if not name or Path(name).name != name:
            raise UsageError(f"{name!r} is not one path component; try 'policy'")
        self._spec = {"kind": "shared_memory", "name": name, "root": root}
        super().__init__(Path(root) / f"primeblocks-{name}", owner=owner, durable=False)

    def spec(self) -> dict[str, Any]:
        return dict(self._spec)


class FileTransport(Slots):
    """Blobs in a directory on a disk that trainer and engine share; synced before a commit.

    Writers on several hosts need a file system with coherent writes (Lustre, GPFS; not NFS):
    where it has none, the digests refuse the version.

    Args:
        path: the directory; made if missing. Other files in it are left alone.
        owner: true on trainer rank 0, and there only.

    Raises:
        UsageError: the directory has a living owner.
    """

    def __init__(self, path: str | Path, *, owner: bool = False) -> None:
        self._spec = {"kind": "file", "path": str(Path(path).absolute())}
        super().__init__(Path(path).absolute(), owner=owner, durable=True)

    def spec(self) -> dict[str, Any]:
        return dict(self._spec)


def open_transport(spec: Mapping[str, Any]) -> Transport:
    """The reading end of the transport whose `spec()` this is.

    Raises:
        UnsupportedError: the kind is unknown here.
    """
    match spec:
        case {"kind": "shared_memory", "name": name, "root": root}:
            return SharedMemoryTransport(name, root=root)
        case {"kind": "file", "path": path}:
            return FileTransport(path)
    raise UnsupportedError(f"no transport for {dict(spec)}; known: shared_memory, file")
