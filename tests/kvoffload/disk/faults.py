"""An operating system that fails or kills at chosen calls."""

import errno
import os
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from tests.kvoffload.disk.small import Unsynced


@dataclass(frozen=True)
class Fault:
    """What happens instead of a call: some bytes are written, then `error`, or the end."""

    written: int = 0
    error: int | None = None

    def strike(self):
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.error, os.strerror(self.error))

    def strike_sql(self):
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise sqlite_error(self.error)


def sqlite_error(number):
    """What SQLite makes of an error of the file system."""
    error = sqlite3.OperationalError(os.strerror(number))
    full = number == errno.ENOSPC
    error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR_WRITE
    return error


class FaultyConnection(sqlite3.Connection):
    """Asks before a transaction is committed or the log copied; and kills after it as well."""

    script = None

    def execute(self, sql, *arguments):
        name = {"COMMIT": "commit", "PRAGMA wal_checkpoint": "checkpoint"}.get(sql.split("(")[0])
        fault = self.script(name, 1) if name else None
        if fault is not None:
            if fault.written and fault.error is None:
                super().execute(sql, *arguments)
            fault.strike_sql()
        return super().execute(sql, *arguments)


class FaultySystem(Unsynced):
    """Asks `script`, with the name of a call and the bytes it would write, for a fault or None.

    Only calls that change something are asked about.
    """

    connection = FaultyConnection

    def __init__(self, script: Callable[[str, int], Fault | None]) -> None:
        self.script = script

    def write(self, descriptor, buffers, offset):
        data = b"".join(buffers)
        fault = self.script("write", len(data))
        if fault is None:
            return super().write(descriptor, buffers, offset)
        if fault.written:
            # Not through `descriptor`, whose direct I/O would refuse some lengths.
            _write_anyhow(descriptor, data[: fault.written], offset)
        fault.strike()

    def _asked(self, name, call, *arguments, **named):
        fault = self.script(name, 0)
        if fault is not None:
            fault.strike()
        return call(*arguments, **named)

    def open(self, path, **how):
        return self._asked("open", super().open, path, **how)

    def truncate(self, descriptor, size):
        return self._asked("truncate", super().truncate, descriptor, size)

    def sync(self, descriptor):
        return self._asked("sync", super().sync, descriptor)

    def connect(self, path):
        connection = super().connect(path)
        connection.script = self.script
        return connection

    def remove(self, path):
        return self._asked("remove", super().remove, path)

    def sync_folder(self, folder):
        return self._asked("sync_folder", super().sync_folder, folder)


def _write_anyhow(descriptor, data, offset):
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
    try:
        os.pwrite(again, data, offset)
    finally:
        os.close(again)
