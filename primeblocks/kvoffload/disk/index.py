"""The index of a disk tier: which page lies in which frame, in SQLite."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from itertools import islice
from operator import itemgetter, xor
from pathlib import Path

import xxhash

from ...errors import CorruptionError, PrimeblocksError, UsageError
from ..page import PageKey
from .data import Place
from .system import System

__all__ = ["Index"]

logger = logging.getLogger(__name__)

_APPLICATION = 0x70626B76
_TABLES = [
    "CREATE TABLE pages (frame INTEGER PRIMARY KEY, age INTEGER, length INTEGER, digest BLOB, "
    "key BLOB)",
    "CREATE TABLE state (newest INTEGER, flushed INTEGER, seal INTEGER, page_bytes INTEGER, "
    "attachment_bytes INTEGER)",
]
_MARK = struct.Struct("<8sQQ")  # of the lock: ours, and the ages of the newest change and flush
_MAGIC = b"pbkvix01"
_SUM = struct.Struct("<Q")
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


class Index:
    """Keys and places of pages, changed a transaction at a time.

    In memory are a digest and a frame for each page; the rest is read when it is wanted. A row's
    age is a number that grows with every change. The file keeps a seal over all keys and frames,
    and the lock the newest age, so what damage takes away or brings back is noticed: where the
    file is damaged it is begun anew, where its newest changes are lost, as after a power cut, only
    pages that had been flushed are believed. An index that is damaged, or of pages of another
    size, stays as it is until the first change.

    Calls that read or change the file raise OSError where the file system refuses, and nothing is
    changed; and CorruptionError where the file turns out to be damaged, and nothing is left.

    Args:
        path: the database.
        lock: descriptor of a file that is ours alone.
        log_pages: the log is copied into the file when it has so many pages of 4 KiB.

    Raises:
        UsageError: the file is somebody else's.
        OSError: the file system refused.
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
        self._stamps: list[object] = []  # of the files, after our last change
        self.lost = 0  # pages, to damage; who reports them counts anew
        self._gone: dict[int, bytes] = {}  # rows that must go before anything else is written
        self._tally = self._newest = self._flushed = 0
        self.begun = self.cleared = False
        self._connect()
        try:
            self._load()
        except (OSError, PrimeblocksError):
            self._connection.close()
            raise

    def put(self, places: Sequence[tuple[PageKey, Place]]) -> list[int]:
        """Name the places of pages, in one transaction, and return the frames of those replaced."""
        rows, names = [], {}
        for age, (key, place) in enumerate(places, start=self._newest + 1):
            names[_name(key)] = place.frame
            rows.append((place.frame, age, place.length, place.digest, key))
        replaced = {self._frames[name]: name for name in names if name in self._frames}
        if rows:
            self._change(replaced, rows, names)
        for name, frame in names.items():
            self._frames.pop(name, None)  # so that it becomes the newest
            self._frames[name] = frame
        return list(replaced)

    def forget(self, keys: Iterable[PageKey]) -> list[int]:
        """Forget pages, in the file with the next `ready`; return the frames that they had."""
        return self._forget({_name(key) for key in keys})

    def cut(self, frames: int) -> list[int]:
        """Forget pages that do not lie within the first `frames` frames."""
        return self._forget({name for name, frame in self._frames.items() if frame >= frames})

    def clear(self) -> None:
        """Forget everything, power cuts included; with the next `ready` where it fails."""
        self._forsake()
        self.cleared = True  # what the file has must not come back
        self._begin()

    def ready(self) -> None:
        """Write what was forgotten, or begin the file."""
        if not self.begun:
            self._begin()
        while self._gone:
            chunk = dict(islice(self._gone.items(), _TOGETHER))
            self._change(chunk, [], {})
            for frame in chunk:
                del self._gone[frame]

    def flush(self) -> None:
        """Make every change survive a power cut."""
        flushed = self._newest
        self._change({}, [], {}, flushed=flushed)
        # Emptied, too: a prefix of the log would hide what the file has.
        self._checkpoint("TRUNCATE")
        self._flushed = flushed  # not before: the lock must not promise what a power cut may take
        self._mark()

    def places(self, keys: Iterable[PageKey]) -> list[Place | None]:
        """Return the places of pages; None for one that is not here."""
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
        """Return all keys, oldest first."""
        with self._typed():
            here = self._connection.execute("SELECT frame, key FROM pages") if self._frames else ()
            encoded = dict(here)
        pairs = [(name, encoded.get(frame)) for name, frame in self._frames.items()]
        return [PageKey.decode(key) for name, key in pairs if key and _name(key) == name]

    def frames(self) -> list[int]:
        """Return the frames of all pages, oldest first."""
        return list(self._frames.values())

    def close(self) -> None:
        """Let go of the file; in a forked child nothing happens."""
        if os.getpid() == self._pid:
            self._connection.close()
        else:  # SQLite would delete the log of the parent, also when Python ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))

    def __contains__(self, key: PageKey) -> bool:
        return _name(key) in self._frames

    def __len__(self) -> int:
        return len(self._frames)

    def _load(self) -> None:
        ours, self._newest, self._flushed = self._marked()
        try:
            with self._typed():
                self._adopt()
        except CorruptionError as error:
            if not ours:
                raise UsageError(
                    f"{self._path} is no index of pages that this version can read. Delete its "
                    "folder, or give the tier another."
                ) from error
            logger.warning("%s. Its pages are dropped, and it is begun anew.", error)

    def _adopt(self) -> None:
        """Believe what the file says, as far as it can be believed."""
        execute = self._connection.execute
        tables = [sql for (sql,) in execute("SELECT sql FROM sqlite_master ORDER BY rowid")]
        application = execute("PRAGMA application_id").fetchone()[0]
        if not tables and not application:
            return
        if application != _APPLICATION or tables != [each.encode() for each in _TABLES]:
            raise self._damaged("its tables are not those of this version")
        self._set_up()
        execute("BEGIN IMMEDIATE")
        execute("UPDATE state SET newest = newest")  # a damaged header may forbid it
        execute("ROLLBACK")
        (check,) = execute("PRAGMA integrity_check(1)").fetchone()
        if check != b"ok":
            raise self._damaged(check.decode(errors="replace"))
        newest, flushed, seal, *sizes = execute("SELECT * FROM state").fetchone() or [None] * 5
        found = execute(
            "SELECT age, frame, key FROM pages "
            "WHERE frame >= 0 AND typeof(age) = 'integer' AND typeof(key) = 'blob'"
        )
        rows = sorted(((age, frame, _name(key)) for age, frame, key in found), key=itemgetter(0))
        tally = reduce(xor, (_mix(frame, name) for _, frame, name in rows), 0)
        if seal != _seal(tally, newest, flushed, tuple(sizes)) or flushed < self._flushed:
            raise self._damaged("what it has is not what was written")
        if tuple(sizes) != self._sizes:
            logger.log(
                logging.WARNING if rows else logging.DEBUG,
                "%s held pages of %d bytes with %d of attachments, and now takes %d with %d: "
                "what it held is dropped. Give each size its own folder to keep both.",
                *(self._path.parent, *sizes, *self._sizes),
            )
            return
        trusted = newest if newest >= self._newest else flushed
        self._frames = {name: frame for age, frame, name in rows if age <= trusted}
        self._gone = {frame: name for age, frame, name in rows if age > trusted}
        self._tally, self._newest, self._flushed = tally, max(newest, self._newest), flushed
        self._stamps = self._stamped()
        self.begun = True

    def _begin(self) -> None:
        """Make the file anew."""
        newest = self._newest + 1
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
            row = (newest, newest, _seal(0, newest, newest, self._sizes), *self._sizes)
            execute("INSERT INTO state VALUES (?, ?, ?, ?, ?)", row)
            execute(f"PRAGMA application_id = {_APPLICATION}")
            execute("COMMIT")
            self._set_up()
        self._newest = self._flushed = newest
        self._stamps = self._stamped()
        self.begun, self.cleared = True, False

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

    def _change(
        self,
        gone: dict[int, bytes],
        rows: list[tuple],
        names: dict[bytes, int],
        *,
        flushed: int | None = None,
    ) -> None:
        """Delete and insert rows; what is in memory is the caller's."""
        flushed = self._flushed if flushed is None else flushed
        tally = reduce(xor, (_mix(frame, name) for frame, name in gone.items()), self._tally)
        tally = reduce(xor, (_mix(frame, name) for name, frame in names.items()), tally)
        newest = self._newest + max(1, len(rows))
        state = (newest, flushed, _seal(tally, newest, flushed, self._sizes))
        try:
            self._commit(gone, rows, state)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._checkpoint("PASSIVE")  # the log is written from its front again
            self._commit(gone, rows, state)
        self._tally, self._newest = tally, newest
        self._mark()

    def _commit(self, gone: Iterable[int], rows: list[tuple], state: tuple) -> None:
        connection = self._connection
        with self._changing():
            try:
                connection.execute("BEGIN IMMEDIATE")
                delete = "DELETE FROM pages WHERE frame = ?"
                connection.executemany(delete, ((frame,) for frame in gone))
                connection.executemany("INSERT INTO pages VALUES (?, ?, ?, ?, ?)", rows)
                connection.execute("UPDATE state SET newest = ?, flushed = ?, seal = ?", state)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _checkpoint(self, mode: str) -> None:
        """Copy the log into the database, with a sync before and after."""
        with self._changing():
            row = self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        if row[0] or row[1] != row[2]:
            raise OSError(errno.EIO, f"{self._path} cannot be brought up to date: {row}")

    def _marked(self) -> tuple[bool, int, int]:
        """Return what the lock says: whether the folder is ours, and two ages."""
        mark = bytearray(_MARK.size + _SUM.size)
        self._system.read(self._lock, [mark], 0)
        magic, newest, flushed = _MARK.unpack_from(mark)
        (expected,) = _SUM.unpack_from(mark, _MARK.size)
        whole = xxhash.xxh3_64_intdigest(bytes(mark[: _MARK.size])) == expected
        return (True, newest, flushed) if whole and magic == _MAGIC else (False, 0, 0)

    def _mark(self) -> None:
        mark = _MARK.pack(_MAGIC, self._newest, self._flushed)
        data = mark + _SUM.pack(xxhash.xxh3_64_intdigest(mark))
        with suppress(OSError):  # an older mark notices less
            self._system.write(self._lock, [data], 0)

    def _forget(self, names: Iterable[bytes]) -> list[int]:
        gone = {self._frames.pop(name): name for name in names if name in self._frames}
        self._gone |= gone
        return list(gone)

    def _forsake(self) -> None:
        """Serve nothing of the file any more."""
        self._frames.clear()
        self._gone.clear()
        self._tally = 0
        self.begun = False

    def _damaged(self, why: object) -> CorruptionError:
        self.lost += len(self._frames)
        self._forsake()
        return CorruptionError(f"{self._path} is damaged: {why}")

    def _stamped(self) -> list[object]:
        return [self._system.stamp(file) for file in (self._path, self._log)]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """As `_typed`, for a change; the files must be as our last change left them."""
        # SQLite itself writes on into a removed file, and copies the holes of a log that was cut.
        if self._stamps != self._stamped():
            raise self._damaged("it or its log was removed, replaced or cut while it was in use")
        try:
            with self._typed():
                yield
        finally:
            self._stamps = self._stamped()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Raise what SQLite says as the error of the file system or the damage that it is."""
        try:
            yield
        except UnicodeDecodeError as error:  # of a message of SQLite's own
            raise self._damaged("a name is no text") from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            number = _ERRORS.get(code & 0xFF)
            if number is None or code in _CUT:
                raise self._damaged(error) from error
            name = getattr(error, "sqlite_errorname", "")
            raise OSError(number, f"{error} ({name}, {self._path})") from error


def _name(key: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key)


def _mix(frame: int, name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name, seed=frame)


def _seal(tally: int, newest: object, flushed: object, sizes: tuple) -> int:
    """Return a digest of all that the file says, whatever damage has made of it."""
    return xxhash.xxh3_64_intdigest(repr((tally, newest, flushed, sizes)).encode()) >> 1
