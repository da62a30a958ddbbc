"""Full versions as buffers: each a file on a disk, or memory of the owner that a link names."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError, TransferError, UsageError
from ..lease import FileLease, Hold
from ..sealed import SealedLease
from .mappings import FileId, Mappings, file_id
from .memory_file import allocate, is_sealed, open_of, seal
from .own_files import open_own

__all__ = ["Blobs", "DiskBlobs", "MemoryBlobs"]

_LINK = re.compile(r"/proc/(\d+)/fd/(\d+)")


class Blobs(Protocol):
    """Buffers of bytes by their paths in a directory of one owner."""

    def make(self, path: Path, size_bytes: int) -> None:
        """Owner: reserve one.

        Raises:
            OSError: there is no room.
        """
        ...

    def reuse(self, old: Path, new: Path, size_bytes: int) -> bool:
        """Owner: make one of another that nobody holds; return whether that could be done."""
        ...

    def writable(self, path: Path, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Writer: return one that was not finished, to be written to in place.

        Raises:
            TransferError: there is none of this size, or this process may not write to it.
        """
        ...

    def finish(self, path: Path) -> None:
        """Owner: finish one that is written."""
        ...

    def drop(self, path: Path) -> None:
        """Owner: remove one, if it is there. Readers that hold it keep it."""
        ...

    def abort(self, path: Path) -> None:
        """Owner: remove one that was not finished; a rank that hangs may still write to it."""
        ...

    def lease(self, path: Path, size_bytes: int) -> FileLease | SealedLease:
        """Reader: hold one that was finished.

        Raises:
            FileNotFoundError, BlockingIOError: it is gone, or another one's by now.
            TransferError: its owner is gone.
            CorruptionError: it has another size, or may still be written to.
        """
        ...

    def close(self) -> None:
        """Let go of what this process has open. Twice is fine."""
        ...


class DiskBlobs:
    """Buffers as files, a new one for each version.

    Args:
        user: as in `Place`.
    """

    def __init__(self, user: int | None) -> None:
        self._user = user

    def make(self, path: Path, size_bytes: int) -> None:
        fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, user=self._user)
        try:
            os.posix_fallocate(fd, 0, size_bytes)  # A full disk would end a later write by SIGBUS.
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)

    def reuse(self, old: Path, new: Path, size_bytes: int) -> bool:
        return False

    def writable(self, path: Path, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        fd = open_own(path, os.O_RDWR, user=self._user)
        try:
            _check_size(path, fd, size_bytes)
            return _map(fd, size_bytes)
        finally:
            os.close(fd)

    def finish(self, path: Path) -> None:
        """Do nothing: the file was synced when it was written."""

    def drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    abort = drop

    def lease(self, path: Path, size_bytes: int) -> FileLease:
        lease = FileLease(Hold(open_own(path, os.O_RDONLY, user=self._user), None))
        size = os.fstat(lease.fd).st_size
        if size != size_bytes:
            lease.close()
            raise _other_bytes(path, size, size_bytes)
        return lease

    def close(self) -> None:
        """Do nothing: no file is open."""


class MemoryBlobs:
    """Memory of the owner, sealed once it is written; `path` is a link to its descriptor in /proc.

    A retired one becomes the next where no reader holds it: touching fresh pages costs more than
    copying into known ones. Readers hold one by a shared flock, which ends with their process.
    Writers and readers keep their mappings.
    """

    def __init__(self) -> None:
        self._owned: dict[str, int] = {}
        self._fixed: set[int] = set()
        self._written: Mappings[UInt8[Tensor, " bytes"]] = Mappings()
        self._read: Mappings[np.ndarray] = Mappings()
        self.close = weakref.finalize(self, _close_all, self._owned, self._written, self._read)

    def make(self, path: Path, size_bytes: int) -> None:
        fd = allocate(_name(path), size_bytes)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._owned[path.name] = fd
        path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")

    def reuse(self, old: Path, new: Path, size_bytes: int) -> bool:
        fd = self._owned.get(old.name, -1)
        if fd < 0 or fd in self._fixed or os.fstat(fd).st_size != size_bytes:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._owned[new.name] = self._owned.pop(old.name)
        old.rename(new)
        return True

    def writable(self, path: Path, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        fd = _open(path, _target(path), os.O_RDWR)
        try:
            file = _check_size(path, fd, size_bytes)
            blob = self._written.take(file, _links(path.parent))
            if blob is None:
                if is_sealed(fd):
                    raise TransferError(
                        f"{path} was written before this rank began to write. Publish again: the "
                        "next version lies in new memory."
                    )
                blob = _map(fd, size_bytes)
            self._written.give(file, blob)
            return blob
        finally:
            os.close(fd)

    def finish(self, path: Path) -> None:
        fd = self._owned[path.name]
        seal(fd)
        # Before anyone can see it, for a reader does not wait for the writer's lock.
        fcntl.flock(fd, fcntl.LOCK_UN)

    def drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        fd = self._owned.pop(path.name, -1)
        if fd >= 0:
            os.close(fd)
        self._fixed.discard(fd)

    def abort(self, path: Path) -> None:
        if path.name in self._owned:
            self.drop(path)
            # A writer may have no mapping of the others, and would get none.
            self._fixed = set(self._owned.values())

    def lease(self, path: Path, size_bytes: int) -> SealedLease:
        target = _target(path)
        try:
            hold = Hold(_open(path, target, os.O_RDONLY), fcntl.LOCK_SH)
        except TransferError:
            _target(path)  # Its owner lives, and may have retired it meanwhile.
            raise
        try:
            if _target(path) != target:
                raise FileNotFoundError(f"{path} is another one by now")
            file = file_id(hold.fd)
            if file.size != size_bytes:
                raise _other_bytes(path, file.size, size_bytes)
            if not is_sealed(hold.fd):
                raise CorruptionError(f"{path} may still be written to. Publish again.")
        except BaseException:
            hold.close()
            raise

        def take() -> np.ndarray:
            mapping = self._read.take(file, _links(path.parent))
            return _map(hold.fd, size_bytes, shared=False).numpy() if mapping is None else mapping

        return SealedLease(hold, take, lambda mapping: self._read.give(file, mapping))


def _close_all(owned: dict[str, int], *mappings: Mappings[Any]) -> None:
    for each in mappings:
        each.clear()
    while owned:
        os.close(owned.popitem()[1])


def _name(path: Path) -> str:
    """Return the name of memory whose link lies in this directory, whose name ends at random."""
    return f"primeblocks-{path.parent.name[-16:]}"


def _target(path: Path) -> tuple[int, int]:
    """Return the process, and its descriptor, that a link of this user names."""
    found = path.lstat()
    link = _LINK.fullmatch(os.readlink(path)) if stat.S_ISLNK(found.st_mode) else None
    if link is None or found.st_uid != os.geteuid():
        raise UsageError(
            f"{path} is not opened: it belongs to user {found.st_uid}, or is no link to memory of "
            "its owner. Remove it."
        )
    return int(link[1]), int(link[2])


def _open(path: Path, target: tuple[int, int], flags: int) -> int:
    return open_of(*target, _name(path), flags)


def _links(directory: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return [path for path in directory.iterdir() if path.is_symlink()]
    return []


def _check_size(path: Path, fd: int, size_bytes: int) -> FileId:
    found = file_id(fd)
    if found.size != size_bytes:
        raise TransferError(
            f"{path} has {found.size} bytes, the plan {size_bytes}. "
            "Trainer ranks must share the directory and the plan."
        )
    return found


def _other_bytes(path: Path, found: int, sent: int) -> CorruptionError:
    return CorruptionError(f"{path} has {found} bytes; {sent} were sent")


def _map(fd: int, size: int, *, shared: bool = True) -> UInt8[Tensor, " bytes"]:
    """Map an open file as a tensor, to be written to."""
    # mmap.mmap keeps a duplicate of the descriptor, and with it a lock.
    with torch.inference_mode(False):
        if sys.platform.startswith("linux"):
            path = f"/proc/self/fd/{fd}"
            return torch.from_file(path, shared=shared, size=size, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
