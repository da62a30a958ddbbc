"""One SQLite file that one process owns: its lock, its schema and its transactions."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from ..errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    UnsupportedError,
    UsageError,
)

__all__ = ["Database"]

_SYNCHRONOUS = {"process": "NORMAL", "power": "FULL"}
_WAL_BYTES = 16 << 20  # A log of this size is copied into the file, with an fsync.


class Database:
    """A file of tables that any thread of one process changes, one transaction at a time.

    Args:
        schema: SQL that makes the tables of a new file.
        schema_version: the number of that schema. An existing file must have it.
        application: the number in the file's header that identifies such files.

    Raises:
        As for `async_loop.Journal`, which passes its arguments on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        schema: str,
        schema_version: int,
        application: int,
        durability: Literal["process", "power"],
        timeout_s: float,
    ) -> None:
        if durability not in _SYNCHRONOUS:
            raise UsageError(f'durability must be "process" or "power"; got {durability!r}')
        self.path = Path(path).absolute()
        if not self.path.parent.is_dir():
            raise UsageError(
                f"the folder {self.path.parent} does not exist. Create the folder first."
            )
        self._timeout_s, self._pid = timeout_s, os.getpid()
        self._mutex = threading.RLock()  # A nested call must not hang.
        self._connection: sqlite3.Connection | None = None
        self._lock = _own(self.path)
        try:
            with self._typed():
                self._connection = _connect(self.path, timeout_s)
                is_new = _is_new(self._connection, self.path, application, schema_version)
                _set_up(self._connection, self.path, _SYNCHRONOUS[durability])
                if is_new:
                    schema += f"PRAGMA application_id = {application};"
                    schema += f"PRAGMA user_version = {schema_version};"
                    self._connection.executescript(f"BEGIN IMMEDIATE;{schema}COMMIT;")
                else:
                    _check_tables(self._connection, schema)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. May be called twice. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._mutex:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Apply all changes made in this context as one transaction, or none if it raises.

        Raises:
            CapacityError, DeadlineError, CorruptionError, ClosedError: as for `async_loop.Journal`.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.path} belongs to process {self._pid}, and a fork cannot use it. Leave it "
                "to that process, or open it in the child only."
            )
        with self._mutex, self._typed():
            connection = self._connection
            if connection is None:
                raise ClosedError(f"{self.path} is closed. Open it again.")
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # SQLite could not decode its own message.
            raise self._damaged("a name is not text") from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            primary = None if code is None else code & 0xFF
            if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
                raise CapacityError(
                    f"no room for {self.path}: {error}. Nothing was changed. Make room on that "
                    "disk, and call again."
                ) from error
            if primary == sqlite3.SQLITE_TOOBIG:
                raise CapacityError(
                    f"one value for {self.path} is larger than SQLite's 1,000,000,000 bytes. "
                    "Nothing was changed. Pack attachments more densely, or keep them elsewhere."
                ) from error
            if primary in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                raise DeadlineError(
                    f"another program wrote to {self.path} for more than {self._timeout_s:g} s. "
                    "Nothing was changed. End its transaction, and call again."
                ) from error
            is_ours = type(error) is sqlite3.DatabaseError and code is None
            if primary in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB} or is_ours:
                raise self._damaged(error) from error
            raise

    def _damaged(self, why: object) -> CorruptionError:
        return CorruptionError(
            f"{self.path} is damaged, or never was a journal: {why}. Restore a backup, or begin a "
            "new journal."
        )


def _own(path: Path) -> sqlite3.Connection:
    """Take the lock next to a file. The lock ends with this process, and a fork does not get it.

    The lock is on an empty database, because SQLite's locks exclude other threads, other processes
    and forks. Other programs can still read the file itself.
    """
    lock: sqlite3.Connection | None = None
    try:
        lock = sqlite3.connect(
            f"{path}-lock", timeout=0, isolation_level=None, check_same_thread=False
        )
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        if lock is not None:
            lock.close()
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            raise UsageError(
                f"{path} is already open in this process or another one. Close it there, or give "
                "each run its own file."
            ) from error
        raise UsageError(f"cannot write in {path.parent}: {error}") from error
    return lock


def _connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    # Damaged text is compared, and found to be unknown, instead of raising a UnicodeDecodeError.
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    return connection


def _is_new(connection: sqlite3.Connection, path: Path, application: int, schema: int) -> bool:
    """Return whether a file is empty. Refuse a file of another application or schema."""
    of, version, tables = (
        connection.execute(query).fetchone()[0]
        for query in (
            "PRAGMA application_id",
            "PRAGMA user_version",
            "SELECT count(*) FROM sqlite_master",
        )
    )
    if not (of or version or tables):
        return True
    if of != application:
        raise UsageError(f"{path} belongs to another application. Choose another path.")
    if version != schema:
        raise UnsupportedError(
            f"{path} has schema {version}, but this version of primeblocks has {schema}. Finish "
            "the run with the version that began the run, or begin a new journal."
        )
    return False


def _check_tables(connection: sqlite3.Connection, schema: str) -> None:
    query = "SELECT sql FROM sqlite_master ORDER BY rowid"
    with closing(sqlite3.connect(":memory:")) as example:
        example.executescript(schema)
        expected = example.execute(query).fetchall()
    if connection.execute(query).fetchall() != expected:
        raise sqlite3.DatabaseError("its tables differ from its schema")


def _set_up(connection: sqlite3.Connection, path: Path, synchronous: str) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode.lower() != "wal":
        raise UnsupportedError(
            f"{path} cannot have a write-ahead log (journal_mode {mode}). Use a path on a disk of "
            "this machine, because network file systems have no shared memory."
        )
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    # Some builds overwrite deleted rows with zeros, which would double the bytes written.
    connection.execute("PRAGMA secure_delete = OFF")
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_BYTES // size}")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
