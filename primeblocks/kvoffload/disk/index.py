"""The index of a disk tier: the frame of each page, in an SQLite database next to `pages`.

The index is in one of three states:

    UNUSED   The file is new, damaged, or of pages of another size. The index is empty. The file
             stays as it is until the first change.
    KEPT     The rows of the file and the frames in memory agree, except for rows in `_gone`.
    CLEARED  `clear` failed. The index is empty, but the file still has its rows.

    any -> CLEARED -> KEPT   `clear`. The second step replaces the file by an empty one, and fails
                             if the file system refuses.
    UNUSED, CLEARED -> KEPT  `ready`, before any other change, repeats that step.
    KEPT -> UNUSED           SQLite reports damage, or a file was removed, replaced or cut.

The index does not vouch for its rows. A page's digest covers its key and its bytes, and every
reader compares the digest. Damage or a power cut may change a row or bring a dropped row back. A
load of its key then misses, or gets a page that was put under this key earlier.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from pathlib import Path

import xxhash

from ...errors import CorruptionError, PrimeblocksError, UsageError
from ..page import PageKey
from .data import Place, System

__all__ = ["FolderState", "Index"]

logger = logging.getLogger(__name__)

_APPLICATION = 0x70626B76
_TABLES = [
    "CREATE TABLE pages (frame INTEGER PRIMARY KEY, age INTEGER, length INTEGER, digest BLOB, "
    "key BLOB)",
    "CREATE TABLE sizes (page_bytes INTEGER, attachment_bytes INTEGER)",
]
_OURS = b"pbkvix01"  # what the lock file of a folder with an index begins with
_OLDEST, _NEWEST = 0, 1 << 62  # ages
_TOGETHER = 256  # drops of one transaction, and rows of one question
_ERRORS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
_CUT = (sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_FSTAT)  # or removed


class FolderState(Enum):
    """The head of this file explains the states."""

    UNUSED = auto()
    KEPT = auto()
    CLEARED = auto()


class Index:
    """The keys and places of pages. Each change is one transaction.

    Memory has a digest of the key and a frame for each page. The rest is read from the file when
    needed. A row's age is a number that grows with every page put.

    Calls that read or change the file raise OSError if the file system refuses, and then change
    nothing. They raise CorruptionError if the file is damaged, and then all pages are lost. The
    constructor raises UsageError for a file that this version cannot read.

    Args:
        path: the database.
        lock: the descriptor of the folder's lock file.
        log_pages: the log is copied into the database when it has this many pages of 4 KiB.
    """

    def __init__(
        self,
        path: Path,
        *,
        lock: int,
        page_bytes: int,
        attachment_bytes: int,
        log_pages: int = 1000,
        system: System,
    ) -> None:
        self._path, self._log = path, path.with_name(f"{path.name}-wal")
        self._lock = lock
        self._sizes = (page_bytes, attachment_bytes)
        self._log_pages = log_pages
        self._system = system
        self._pid = os.getpid()
        self._frames: dict[bytes, int] = {}  # by digest of the key, oldest first
        # Of the files, when last seen.
        self._stamps: list[tuple[int, int, int] | None] = [None, None]
        self._is_seen = False  # after our last change
        self.lost = 0  # pages, to damage; who reports them counts anew
        self._gone: list[int] = []  # frames of rows to delete before anything else is written
        self._age = _OLDEST
        self.state = FolderState.UNUSED
        self._connect()
        try:
            self._load()
        except (OSError, PrimeblocksError):
            self._connection.close()
            raise

    def put(self, places: Sequence[tuple[PageKey, Place]]) -> list[int]:
        """Write the places of pages in one transaction. Return the frames of replaced pages."""
        names = {_name(key): place.frame for key, place in places}
        rows = [
            (place.frame, age, place.length, place.digest, key)
            for age, (key, place) in enumerate(places, start=self._age + 1)
        ]
        replaced = [self._frames[name] for name in names if name in self._frames]
        if rows:
            self._change(replaced, rows)
        for name, frame in names.items():
            self._frames.pop(name, None)  # so that it becomes the newest
            self._frames[name] = frame
        return replaced

    def forget(self, keys: Iterable[PageKey]) -> list[int]:
        """Remove pages. Return their frames. The next `ready` writes the removal to the file."""
        return self._forget({_name(key) for key in keys})

    def cut(self, frames: int) -> list[int]:
        """Remove the pages behind the first `frames` frames. Return their frames."""
        return self._forget({name for name, frame in self._frames.items() if frame >= frames})

    def clear(self) -> None:
        """Remove all pages, so that a power cut cannot bring them back. `ready` tries again."""
        self._empty(FolderState.CLEARED)
        self._begin()

    def ready(self) -> None:
        """Write pending removals, or start the file anew."""
        if self.state is not FolderState.KEPT:
            self._begin()
        while self._gone:
            self._change(self._gone[:_TOGETHER], [])
            del self._gone[:_TOGETHER]

    def flush(self) -> None:
        """Make every change survive a power cut."""
        # Emptied, too: a prefix of the log would hide what the file has.
        self._checkpoint("TRUNCATE")

    def places(self, keys: Iterable[PageKey]) -> list[Place | None]:
        """Return the places of pages, with None for a missing page."""
        frames = [self._frames.get(_name(key)) for key in keys]
        here = [frame for frame in frames if frame is not None]
        rows: dict[int | None, Place] = {}
        with self._typed():
            for start in range(0, len(here), _TOGETHER):
                some = ",".join(map(str, here[start : start + _TOGETHER]))
                query = (
                    f"SELECT frame, length, digest FROM pages WHERE frame IN ({some}) "
                    "AND typeof(length) = 'integer' AND typeof(digest) = 'blob'"
                )
                rows |= {row[0]: Place(*row) for row in self._connection.execute(query)}
        return [rows.get(frame) for frame in frames]

    def keys(self) -> list[PageKey]:
        with self._typed():
            query = "SELECT frame, key FROM pages WHERE typeof(key) = 'blob'"
            encoded = dict(self._connection.execute(query) if self._frames else ())
        try:
            return [PageKey.decode(encoded[frame]) for frame in self._frames.values()]
        except (CorruptionError, KeyError) as error:
            raise self._damaged(f"a key cannot be read ({error!r})") from error

    def frames(self) -> list[int]:
        return list(self._frames.values())

    def close(self) -> None:
        """Close the file. A forked child leaves the file alone."""
        if os.getpid() == self._pid:
            self._connection.close()
        else:  # SQLite would delete the log of the parent, also when Python ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))

    def __contains__(self, key: PageKey) -> bool:
        return _name(key) in self._frames

    def __len__(self) -> int:
        return len(self._frames)

    def _load(self) -> None:
        try:
            with self._typed():
                self._adopt()
        except CorruptionError as error:
            mark = bytearray(len(_OURS))
            self._system.read(self._lock, [mark], 0)
            if mark != _OURS:
                raise UsageError(
                    f"{self._path} is not an index of pages that this version can read. Delete its "
                    "folder, or give the tier another folder."
                ) from error
            logger.warning("%s. Its pages are dropped, and a new index is begun.", error)

    def _adopt(self) -> None:
        """Read the frame of every page."""
        execute = self._connection.execute
        tables = [sql for (sql,) in execute("SELECT sql FROM sqlite_master ORDER BY rowid")]
        application = execute("PRAGMA application_id").fetchone()[0]
        if not tables and not application:
            return
        if application != _APPLICATION or tables != [each.encode() for each in _TABLES]:
            raise self._damaged("its tables differ from those of this version")
        self._set_up()
        execute("BEGIN IMMEDIATE")
        execute("UPDATE sizes SET page_bytes = page_bytes")  # a damaged header may forbid it
        execute("ROLLBACK")
        (check,) = execute("PRAGMA integrity_check(1)").fetchone()
        if check != b"ok":
            raise self._damaged(check.decode(errors="replace"))
        sizes = execute("SELECT * FROM sizes").fetchone()
        rows = execute(
            "SELECT age, frame, key FROM pages WHERE frame >= 0 AND typeof(age) = 'integer' "
            f"AND age BETWEEN {_OLDEST} AND {_NEWEST} AND typeof(key) = 'blob' ORDER BY age"
        ).fetchall()
        if sizes != self._sizes:
            logger.log(
                logging.WARNING if rows else logging.DEBUG,
                "%s had pages of %s bytes with %s bytes of attachments, but now has pages of %d "
                "bytes with %d. Its old pages are not served, and the first write, flush or clear "
                "deletes them. Give each size its own folder to keep both.",
                self._path.parent,
                *(sizes or (None, None)),
                *self._sizes,
            )
            return
        for self._age, frame, key in rows:
            if (name := _name(key)) in self._frames:  # damage brought an older row back
                self._gone.append(self._frames.pop(name))
            self._frames[name] = frame
        self._see()
        self._mark()
        self.state = FolderState.KEPT

    def _begin(self) -> None:
        """Make the file anew."""
        self._mark()  # ours from here on, whatever becomes of it
        with self._typed():
            self._connection.close()
            # In this order: a log without its database is ignored.
            self._system.remove(self._path)
            self._system.remove(self._log)
            self._system.sync_folder(self._path.parent)
            self._connect()
            execute = self._connection.execute
            execute("PRAGMA journal_mode = MEMORY")
            execute("BEGIN IMMEDIATE")
            for table in _TABLES:
                execute(table)
            execute("INSERT INTO sizes VALUES (?, ?)", self._sizes)
            execute(f"PRAGMA application_id = {_APPLICATION}")
            execute("COMMIT")
            self._set_up()
        self._see()
        self.state = FolderState.KEPT

    def _connect(self) -> None:
        with self._typed():
            self._connection = self._system.connect(self._path)
            self._connection.text_factory = bytes  # damage may turn bytes into text

    def _set_up(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA synchronous = {self._system.synchronous}")
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {self._log_pages}")
        # Some builds overwrite what is deleted with zeros: it would double what is written.
        self._connection.execute("PRAGMA secure_delete = OFF")

    def _change(self, gone: Sequence[int], rows: Sequence[tuple]) -> None:
        """Delete rows by frame, and insert other rows. The caller changes what is in memory."""
        try:
            self._commit(gone, rows)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._checkpoint("PASSIVE")  # the log is written from its front again
            self._commit(gone, rows)
        self._age += len(rows)

    def _commit(self, gone: Sequence[int], rows: Sequence[tuple]) -> None:
        connection = self._connection
        with self._changing():
            try:
                connection.execute("BEGIN IMMEDIATE")
                delete = "DELETE FROM pages WHERE frame = ?"
                connection.executemany(delete, ((frame,) for frame in gone))
                # A row that was not adopted may name the frame.
                connection.executemany("REPLACE INTO pages VALUES (?, ?, ?, ?, ?)", rows)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _checkpoint(self, mode: str) -> None:
        """Copy the log into the database, with a sync before and after."""
        with self._changing():
            row = self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        if row[0] or row[1] != row[2]:
            raise OSError(
                errno.EIO, f"the log of {self._path} cannot be copied into the database: {row}"
            )

    def _mark(self) -> None:
        with suppress(OSError):  # without it a damaged index is refused, not replaced
            self._system.write(self._lock, [_OURS], 0)

    def _forget(self, names: Iterable[bytes]) -> list[int]:
        gone = [self._frames.pop(name) for name in names if name in self._frames]
        self._gone += gone
        return gone

    def _empty(self, state: FolderState) -> None:
        """Stop serving the pages of the file."""
        self._frames.clear()
        self._gone.clear()
        self.state = state

    def _damaged(self, why: object) -> CorruptionError:
        self.lost += len(self._frames)
        self._empty(FolderState.UNUSED if self.state is FolderState.KEPT else self.state)
        return CorruptionError(f"{self._path} is damaged: {why}")

    def _stamped(self) -> list[tuple[int, int, int] | None]:
        return [self._system.stamp(file) for file in (self._path, self._log)]

    def _see(self) -> None:
        self._is_seen = False
        self._stamps, self._is_seen = self._stamped(), True

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """As `_typed`, for a change. The files must be as our last change left them."""
        # SQLite itself writes on into a removed file, and copies the holes of a log that was cut.
        now, then = self._stamped(), self._stamps
        same_file = now[0] is not None and then[0] is not None and now[0][:2] == then[0][:2]
        if not same_file or (self._is_seen and now != then):
            raise self._damaged("it or its log was removed, replaced or cut while it was in use")
        try:
            with self._typed():
                yield
        finally:
            with suppress(OSError):  # Then the next change compares no sizes.
                self._see()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Raise errors of SQLite as OSError, or as CorruptionError if the file is damaged."""
        try:
            yield
        except UnicodeDecodeError as error:  # of a message of SQLite's own
            raise self._damaged("a name is not text") from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            number = _ERRORS.get(code & 0xFF)
            if number is None or code in _CUT:
                raise self._damaged(error) from error
            name = getattr(error, "sqlite_errorname", "")
            raise OSError(number, f"{error} ({name}, {self._path})") from error


def _name(key: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key)
