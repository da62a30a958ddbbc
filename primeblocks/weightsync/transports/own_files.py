"""Files in a directory of one owner: they belong to its user, and nobody else writes to them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from ...errors import UsageError
from ..lease import Hold

__all__ = ["LOCK", "open_own", "read_own", "removable", "remove", "take_lock", "write_over"]

LOCK = "primeblocks.lock"
_OURS = re.compile(
    r"(version-\d+\.(safetensors|\d+\.delta|lock)|(rank-\d+|commits|announced)\.json)(\.tmp)?"
    rf"|note\.tmp|{re.escape(LOCK)}"
)
_REFUSED = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)


def open_own(path: Path, flags: int, *, user: int | None = None) -> int:
    """Open a file that belongs to this user, and that nobody else can write to.

    Args:
        user: the owner that it has to have instead, where a mount shows other users and modes.

    Raises:
        FileNotFoundError, FileExistsError: as os.open.
        UsageError: it is a link, or no file, or another user's, or may not be opened.
    """
    kept = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # A pipe would be waited for.
    try:
        fd = os.open(path, flags | kept, 0o600)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise UsageError(f"{path} is not opened: {error.strerror}. Remove it.") from error
    found = os.fstat(fd)
    wanted = os.geteuid() if user is None else user
    open_to_others = user is None and found.st_mode & 0o022
    if not stat.S_ISREG(found.st_mode) or found.st_uid != wanted or open_to_others:
        os.close(fd)
        raise UsageError(
            f"{path} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}; it has to "
            f"be a file of user {wanted} that others cannot write to. It was not read; remove it."
        )
    return fd


def read_own(path: Path, at: int = 0, size: int = -1, *, user: int | None) -> bytes:
    """Return bytes of a file, to its end at most. Raises as `open_own`."""
    with open(open_own(path, os.O_RDONLY, user=user), "rb") as file:
        file.seek(at)
        return file.read(size)


def write_over(
    path: Path, parts: Iterable[bytes | memoryview], *, durable: bool, scratch: Path | None = None
) -> None:
    """Write over a file, in one step; `scratch` is in its place until then."""
    scratch = path.with_name(f"{path.name}.tmp") if scratch is None else scratch
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.writelines(parts)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    scratch.replace(path)


def remove(directory: Path, *, keep: Collection[str] = ()) -> None:
    """Remove the files that owners make in a directory of theirs, and the directory if empty."""
    with suppress(FileNotFoundError):
        for path in removable(directory, keep=keep):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()


def removable(directory: Path, *, keep: Collection[str] = ()) -> list[Path]:
    """Return the files that owners make in their directory, save those of `keep`; the lock last."""
    # Without it nobody knows that the rest is useless.
    ours = (p for p in directory.iterdir() if _OURS.fullmatch(p.name) and p.name not in keep)
    return sorted(ours, key=lambda path: (path.name == LOCK, path))


def take_lock(path: Path, *, user: int | None = None) -> Hold:
    """Take the lock of an owner, on a file that has this name.

    Raises:
        BlockingIOError: another one has it.
        FileNotFoundError: it was removed meanwhile.
    """
    fd = open_own(path, os.O_RDWR | os.O_CREAT, user=user)
    inode = os.fstat(fd).st_ino
    lock = Hold(fd, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        if os.stat(path).st_ino == inode:
            return lock
    lock.close()
    raise FileNotFoundError(f"{path} was removed")
