"""A file in shared memory whose locks end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ...errors import CapacityError, CorruptionError, UnsupportedError, UsageError

__all__ = ["SharedFile"]

# First in the file: magic; digest and length of the settings; the settings, which are JSON.
HEADER_BYTES = 4096
_MAGIC = b"pb-room2"
_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
# Locks are of bytes far behind the end of the file.
_FIRST_LOCK = 1 << 40
_ATTACHED = _FIRST_LOCK - 1

# Files that this process has open, and the process, for a fork inherits the entries. Closing any
# descriptor of a file ends all locks that its process has on it, so there must never be a second.
_open_here: dict[tuple[int, int], int] = {}


class SharedFile:
    """A file of fixed size that processes map and lock; `memory` is what is behind its header.

    Its locks are POSIX record locks: a fork does not inherit them, and the kernel ends them when
    their process dies. They do not keep out threads of one process.

    Args:
        fd: open for reading and writing; owned from here on.
        path: its name.
        memory: the mapped file.
    """

    def __init__(self, fd: int, path: Path, memory: np.ndarray) -> None:
        self.path, self._fd, self._pid = path, fd, os.getpid()
        self._header, self.memory = memory[:HEADER_BYTES], memory[HEADER_BYTES:]
        found = os.fstat(fd)
        self._id = (found.st_dev, found.st_ino)
        _open_here[self._id] = self._pid
        self.close = weakref.finalize(self, _close, fd, self._id, self._pid)

    @classmethod
    def create(cls, name: str, settings: dict[str, Any], *, size_bytes: int) -> SharedFile:
        """Make a file of zeros behind its settings; one that nobody has open is replaced.

        Args:
            size_bytes: behind the header.

        Raises:
            UsageError: it exists, and a process has it open; or the name is none.
            CapacityError: the machine has less memory for it.
            UnsupportedError: it has no /dev/shm.
        """
        path = _path(name)
        while (old := _open(path)) is not None:
            try:
                if not _try_lock(old, _ATTACHED):
                    raise UsageError(
                        f"{path} exists, and a process has it open. Attach to it, or take another "
                        "name."
                    )
                if _is(old, path):
                    path.unlink()  # Only who holds this lock removes a file that nobody has open.
            finally:
                os.close(old)
        fd = _unnamed(path.parent)
        try:
            _reserve(fd, HEADER_BYTES + size_bytes)
            text = json.dumps(settings).encode()
            parts = [_MAGIC, xxhash.xxh3_64_digest(text), len(text).to_bytes(8, "little"), text]
            os.pwrite(fd, b"".join(parts), 0)
            memory = _map(fd)
            _try_lock(fd, _ATTACHED, shared=True)
            # It has a name only once it is whole: death leaves no half of one.
            # With a directory, though the path is absolute: without one Python follows no link.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except FileExistsError as error:
            os.close(fd)
            raise UsageError(f"{path} was created by another process just now") from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path, memory)

    @classmethod
    def attach(cls, name: str) -> SharedFile:
        """Open a file that was created.

        Raises:
            UsageError: there is none, it is another user's, this process has it open, or it is
                being replaced.
            CorruptionError: it is cut off.
        """
        path = _path(name)
        fd = _open(path)
        if fd is None:
            raise UsageError(f"there is no {path}. Create it first, under the same name.")
        try:
            if (size := os.fstat(fd).st_size) < HEADER_BYTES:
                raise CorruptionError(f"{path} has {size} bytes, less than its header. Remove it.")
            memory = _map(fd)
            if not _try_lock(fd, _ATTACHED, shared=True) or not _is(fd, path):
                raise UsageError(f"{path} is being replaced. Attach again.")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path, memory)

    def settings(self) -> dict[str, Any]:
        """Return what it was created with.

        Raises:
            CorruptionError: the header is not what was written.
        """
        header = self._header.tobytes()
        text = header[24 : 24 + int.from_bytes(header[16:24], "little")]
        if header[:8] != _MAGIC or header[8:16] != xxhash.xxh3_64_digest(text):
            raise CorruptionError(
                f"{self.path} was damaged, or another version of primeblocks created it. "
                "Remove it and create it again."
            )
        return dict(json.loads(text))

    @property
    def inherited(self) -> bool:
        """Whether the process that this one was forked from opened it."""
        return self._pid != os.getpid()

    def try_lock(self, index: int) -> bool:
        """Lock against other processes. Return False if one of them holds this lock."""
        return _try_lock(self._fd, _FIRST_LOCK + index)

    def unlock(self, index: int) -> None:
        """Let go of a lock; of one that is not held, do nothing."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _FIRST_LOCK + index)

    def remove(self) -> None:
        """Remove the name, if it still is this file's; callers exclude each other by a lock."""
        if _is(self._fd, self.path):
            self.path.unlink()


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise UsageError(f"a name is made of letters, digits, '_', '.' and '-'; got {name!r}")
    return _FOLDER / f"primeblocks-{name}"


def _open(path: Path) -> int | None:
    """Open a file of this user's that this process has not open."""
    try:
        found = path.lstat()
        if found.st_uid != os.geteuid():
            raise UsageError(f"{path} belongs to user {found.st_uid}. Take another name.")
        if _open_here.get((found.st_dev, found.st_ino)) == os.getpid():
            raise UsageError(
                f"this process has {path} open already. Share the object: its calls may come from "
                "several threads."
            )
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _unnamed(folder: Path) -> int:
    """Open a file without a name, which only this user may read or write."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnsupportedError(
            f"no file can be made in {folder}: {error.strerror}. It has to be a tmpfs that this "
            "user may write to: mount one."
        ) from error


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _map(fd: int) -> np.ndarray:
    """Map a whole file. All locks of this process on it end: take them afterwards."""
    # mmap.mmap keeps a descriptor of its own, which would end them again when it is freed.
    size = os.fstat(fd).st_size
    with torch.inference_mode(False):
        path = f"/proc/self/fd/{fd}"
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)  # Without it, a store where none is left is a SIGBUS.
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}:
            raise
        free = os.statvfs(_FOLDER)
        raise CapacityError(
            f"{size:,} bytes of shared memory were asked for; {_FOLDER} has "
            f"{free.f_bavail * free.f_frsize:,}. Lower capacity_bytes, or enlarge it."
        ) from error


def _try_lock(fd: int, byte: int, *, shared: bool = False) -> bool:
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _close(fd: int, file_id: tuple[int, int], pid: int) -> None:
    # Not in a fork: there it would end the locks of a file that the fork opened itself.
    if pid == os.getpid():
        os.close(fd)
        _open_here.pop(file_id, None)
