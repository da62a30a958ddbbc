"""The calls that a disk tier makes to the operating system, so that tests can make them fail."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["System"]

logger = logging.getLogger(__name__)

_JOURNAL = b"pbkvjl01"


class System:
    """The file system. Every call may raise OSError, and what `connect` returns sqlite3.Error.

    Tests of faults use a subclass that fails, tears or forgets; no other part of a disk tier
    touches a file.
    """

    connection = sqlite3.Connection
    synchronous = "NORMAL"  # as SQLite has it: it syncs before and after a checkpoint alone

    def own(self, folder: Path) -> int:
        """Make a folder and lock it; closing the descriptor, or dying, gives it up.

        Raises:
            BlockingIOError: another owner has it.
            FileExistsError: it holds files with our names, but has never been ours.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "lock"
        foreign = [name for name in ("index", "journal", "pages") if (folder / name).exists()]
        if foreign and not lock.exists():
            raise FileExistsError(f"{folder} holds {' and '.join(foreign)} of something else")
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        _remove_old(folder / "journal")
        return descriptor

    def open(self, path: Path, *, direct: bool = False) -> int:
        """Open a file for reading and writing, made if absent; `direct` is O_DIRECT."""
        flags = os.O_CREAT | os.O_RDWR | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, 0o600)

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open a database, made if absent, for this process alone and any of its threads."""
        connection = sqlite3.connect(
            path,
            timeout=0,
            isolation_level=None,
            check_same_thread=False,
            factory=self.connection,
        )
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # needs no file for shared memory
        return connection

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def stamp(self, file: int | Path) -> tuple[int, int, int] | None:
        """Return a file's device, number and size; None if nothing has this path."""
        try:
            found = os.stat(file)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino, found.st_size

    def in_place(self, descriptor: int, path: Path) -> bool:
        """Tell whether a path still names this open file."""
        ours, there = self.stamp(descriptor), self.stamp(path)
        return ours is not None and there is not None and ours[:2] == there[:2]

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Write buffers one after the other; return the number of bytes taken."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Fill buffers one after the other; return the number of bytes read, 0 at the end."""
        return os.preadv(descriptor, buffers, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Make what was written survive a power cut."""
        os.fdatasync(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Make the names of files survive a power cut."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_old(journal: Path) -> None:
    """Remove the index that came before SQLite, if it is one: its pages are dropped."""
    if journal.is_file():
        with journal.open("rb") as file:
            ours = file.read(len(_JOURNAL)) == _JOURNAL
        if ours:
            logger.warning("%s is of an older version, and its pages are dropped", journal)
            journal.unlink()
