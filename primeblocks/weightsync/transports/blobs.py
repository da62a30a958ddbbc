"""Buffers of full versions. Each is a file on a disk, or memory of the owner, which a link names.

Memory has a descriptor and no path. Other processes of this user open it through /proc. Its size
never changes. A buffer of memory goes through these states:

- `make`: the owner reserves the memory, and trainer ranks write through shared mappings.
- `seal`: the owner seals it before the commit. From then on only the existing mappings can write.
- `open`: a reader holds it by a shared flock, which ends with the reader's process.
- `reuse`: the owner writes the next version into a retired buffer that has no reader.
- `drop`: the owner removes it. A reader that holds the buffer keeps it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError, TransferError, UnsupportedError, UsageError
from ..held import BlobFile, Sealed
from ..lease import Hold
from ..plan import Plan
from .place import open_own

__all__ = ["DiskBlobs", "MemoryBlobs", "allocate", "check_size", "mapped", "open_of"]

_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of Linux 5.1, which fcntl does not name.
_LINK = re.compile(r"/proc/(\d+)/fd/(\d+)")


def allocate(name: str, size_bytes: int) -> int:
    """Return the descriptor of new memory, all of it reserved. Only this user may open it.

    Raises:
        OSError: there is not enough memory.
    """
    # Nothing else bounds anonymous memory: reserving too much would end in the kernel's OOM killer.
    # This is the memory of the machine. A limit of a container is not seen.
    with open("/proc/meminfo") as file:
        rows = dict(line.split(":") for line in file)
    free_bytes = int(rows["MemAvailable"].split()[0]) * 1024
    if size_bytes > free_bytes:
        raise OSError(errno.ENOMEM, f"{free_bytes:,} bytes free")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size_bytes)
        # Reserved now: a full machine would end a later write with SIGBUS.
        if size_bytes > 0:
            os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_of(pid: int, fd: int, name: str, flags: int) -> int:
    """Open memory of another process, given its descriptor in that process and its name."""
    path = f"/proc/{pid}/fd/{fd}"
    gone = TransferError(
        f"the memory of process {pid} is not available. The process has ended, or has freed the "
        "memory. A trainer in another container is visible only in the same PID namespace "
        "(docker run --pid=container:...)."
    )
    try:
        opened = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise UnsupportedError(
            f"{path} cannot be opened: {error}. Run trainer and engine as one user."
        ) from error
    except OSError as error:
        raise gone from error
    # Another process may have got the same process id and the same descriptor.
    if not os.readlink(f"/proc/self/fd/{opened}").startswith(f"/memfd:{name} "):
        os.close(opened)
        raise gone
    return opened


def mapped(fd: int, size_bytes: int, *, shared: bool) -> UInt8[Tensor, " bytes"]:
    """Map an open file as a tensor. Without `shared`, writes stay in this process."""
    # Not mmap.mmap, which keeps a duplicate of the descriptor, and so keeps the lock.
    with torch.inference_mode(False):
        path = f"/proc/self/fd/{fd}"
        return torch.from_file(path, shared=shared, size=size_bytes, dtype=torch.uint8)


class DiskBlobs:
    """Buffers as files, with a new file for each version. Raises the errors of `MemoryBlobs`."""

    def __init__(self, user: int | None) -> None:
        self._user = user

    def make(self, path: Path, size_bytes: int) -> None:
        fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, user=self._user)
        try:
            os.posix_fallocate(fd, 0, size_bytes)  # A full disk would end a later write by SIGBUS.
        finally:
            os.close(fd)

    def writable(self, path: Path, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        fd = open_own(path, os.O_RDWR, user=self._user)
        try:
            check_size(path, os.fstat(fd).st_size, size_bytes)
            return mapped(fd, size_bytes, shared=True)
        finally:
            os.close(fd)

    def drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    abort = drop

    def open(self, path: Path, plan: Plan, *, start: int) -> BlobFile:
        size_bytes = start + plan.blob_bytes
        hold = Hold(open_own(path, os.O_RDONLY, user=self._user), None)
        size = os.fstat(hold.fd).st_size
        if size != size_bytes:
            hold.close()
            raise CorruptionError(
                f"{path} has {size} bytes, but {size_bytes} bytes were sent. Publish again."
            )
        return BlobFile(plan, hold, start=start)


class MemoryBlobs:
    """Buffers in memory of the owner. A path links to each buffer's descriptor in /proc.

    The head of this file describes their states. A retired buffer is reused, because fresh pages
    cost more than a copy into touched pages. Writers and readers keep their mappings, because
    mapping a gigabyte again costs as much as several copies of it.
    """

    def __init__(self) -> None:
        self._owned: dict[str, int] = {}
        self._fixed: set[int] = set()
        # By inode. While a file is mapped, no other file has its inode.
        self._written: dict[int, UInt8[Tensor, " bytes"]] = {}
        self._read: dict[int, np.ndarray] = {}
        self.close = weakref.finalize(self, _close_all, self._owned, self._written, self._read)

    def make(self, path: Path, size_bytes: int) -> None:
        """Owner: reserve a buffer. Raises OSError without enough memory."""
        fd = allocate(_name(path), size_bytes)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._owned[path.name] = fd
        path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")

    def reuse(self, old: Path, new: Path, size_bytes: int) -> bool:
        """Owner: turn an old buffer without readers into a new one. Return whether that worked."""
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
        """Writer: return an unsealed buffer, to write to in place.

        Raises:
            FileNotFoundError: the buffer does not exist.
            TransferError: the buffer has another size, or this process may not write to it.
        """
        fd = open_of(*_target(path), _name(path), os.O_RDWR)
        try:
            found = os.fstat(fd)
            check_size(path, found.st_size, size_bytes)
            _forget_unlinked(self._written, path.parent)
            if found.st_ino not in self._written:
                if _is_sealed(fd):
                    raise TransferError(
                        f"{path} was written before this rank began to write. Publish again: the "
                        "next version gets new memory."
                    )
                self._written[found.st_ino] = mapped(fd, size_bytes, shared=True)
            return self._written[found.st_ino]
        finally:
            os.close(fd)

    def seal(self, path: Path) -> None:
        """Owner: forbid all writes to a buffer except through existing mappings."""
        try:
            fcntl.fcntl(self._owned[path.name], fcntl.F_ADD_SEALS, _FUTURE_WRITE)
        except OSError as error:
            raise UnsupportedError(
                f"memory cannot be sealed: {error}. Use Linux 5.1 or newer, or FileTransport."
            ) from error
        # Unlocked before the commit, because a reader does not wait for the writer's lock.
        fcntl.flock(self._owned[path.name], fcntl.LOCK_UN)

    def drop(self, path: Path) -> None:
        """Owner: remove a buffer if it exists. A reader that holds the buffer keeps it."""
        path.unlink(missing_ok=True)
        fd = self._owned.pop(path.name, -1)
        if fd >= 0:
            os.close(fd)
        self._fixed.discard(fd)

    def abort(self, path: Path) -> None:
        """Owner: remove an unfinished buffer. A rank that hangs may still write to it."""
        if path.name in self._owned:
            self.drop(path)
            # Do not reuse the sealed buffers, because a writer without a mapping cannot map them.
            self._fixed = set(self._owned.values())

    def open(self, path: Path, plan: Plan, *, start: int) -> Sealed:
        """Reader: hold a finished buffer. Its tensors begin at byte `start`.

        Raises:
            FileNotFoundError, BlockingIOError: the buffer was removed, or reused for a new version.
            TransferError: the owner has ended.
            CorruptionError: the buffer has another size, or may still be written to.
        """
        target, size_bytes = _target(path), start + plan.blob_bytes
        try:
            hold = Hold(open_of(*target, _name(path), os.O_RDONLY), fcntl.LOCK_SH)
        except TransferError:
            _target(path)  # Raises FileNotFoundError if a living owner has retired it.
            raise
        try:
            if _target(path) != target:
                raise FileNotFoundError(f"{path} was replaced by another file")
            found = os.fstat(hold.fd)
            if found.st_size != size_bytes:
                raise CorruptionError(
                    f"{path} has {found.st_size} bytes, but {size_bytes} bytes were sent. Publish "
                    "again."
                )
            if not _is_sealed(hold.fd):
                raise CorruptionError(f"{path} may still be written to. Publish again.")
        except BaseException:
            hold.close()
            raise

        def take() -> np.ndarray:
            _forget_unlinked(self._read, path.parent)
            kept = self._read.pop(found.st_ino, None)
            return mapped(hold.fd, size_bytes, shared=False).numpy() if kept is None else kept

        def give(mapping: np.ndarray) -> None:
            self._read[found.st_ino] = mapping

        return Sealed(plan, hold, take, give, start=start)


def check_size(path: Path, found: int | None, size_bytes: int) -> None:
    if found != size_bytes:
        raise TransferError(
            f"{path} has {found} bytes, but the plan needs {size_bytes}. Trainer ranks must share "
            "the directory and the plan."
        )


def _close_all(owned: dict[str, int], *mappings: dict[int, Any]) -> None:
    for each in mappings:
        each.clear()
    while owned:
        os.close(owned.popitem()[1])


def _forget_unlinked(mappings: dict[int, Any], directory: Path) -> None:
    """Drop the mappings of memory whose link was removed."""
    inodes = set()
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            with suppress(OSError):
                if path.is_symlink():
                    inodes.add(path.stat().st_ino)
    for inode in mappings.keys() - inodes:
        mappings.pop(inode, None)


def _is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FUTURE_WRITE)


def _name(path: Path) -> str:
    return f"primeblocks-{path.parent.name[-16:]}"


def _target(path: Path) -> tuple[int, int]:
    """Return the process and the descriptor that a link of this user names."""
    found = path.lstat()
    link = _LINK.fullmatch(os.readlink(path)) if stat.S_ISLNK(found.st_mode) else None
    if link is None or found.st_uid != os.geteuid():
        raise UsageError(
            f"{path} was refused: it belongs to user {found.st_uid}, or is not a link to memory "
            "of its owner. Remove this path."
        )
    return int(link[1]), int(link[2])
