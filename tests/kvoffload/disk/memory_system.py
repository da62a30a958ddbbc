"""Files that a power cut can hit: what was not synced is lost in part, in any order.

The lock and the pages are in memory. The index is SQLite's, in real files, and SQLite says when it
syncs them: when it makes a database, around a checkpoint, and when a log has got a new header.
Between these it writes to the log alone.
"""

import errno
import os
import shutil
import sqlite3
import tempfile
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path

from primeblocks.kvoffload.disk import System

SECTOR = 512


class PowerCut(BaseException):
    """No error that a tier could handle."""


@dataclass(eq=False)
class MemoryFile:
    durable: bytes = b""
    current: bytearray = field(default_factory=bytearray)
    pending: list = field(default_factory=list)  # (offset, bytes) or a size, oldest first

    def survivor(self, random, *, all=False):
        """What a power cut leaves: some of the sectors and sizes that were not synced, or all."""
        data = bytearray(self.durable)
        chance = 1 if all else random.choice([0, 0.3, 0.7, 0.95, 1])
        for change in self.pending:
            if not all and random.random() >= chance:
                continue
            if isinstance(change, int):
                resize(data, change)
            else:
                put(data, *change)
        return MemoryFile(bytes(data), bytearray(data))


@dataclass(frozen=True)
class Database:
    """The files of an index: bytes, None for a file that is not there."""

    index: bytes | None = None
    log: bytes | None = None

    @classmethod
    def of(cls, path):
        both = (path, path.with_name(f"{path.name}-wal"))
        return cls(*(each.read_bytes() if each.exists() else None for each in both))

    def write(self, path):
        for data, file in ((self.index, path), (self.log, path.with_name(f"{path.name}-wal"))):
            file.unlink(missing_ok=True)
            if data is not None:
                file.write_bytes(data)


class Watched(sqlite3.Connection):
    """Tells its system what SQLite has synced, and may lose power while a checkpoint is made."""

    system = None

    def execute(self, sql, *arguments):
        changes = sql == "COMMIT" or "wal_checkpoint" in sql
        if changes:
            self.system._step()
        before = self.system and Database.of(self.system.index)
        answer = super().execute(sql, *arguments)
        if before:
            self.system._watch(before, cut=changes)
        return answer

    def close(self):
        before = Database.of(self.system.index)
        super().close()
        self.system._watch(before, cut=False)


def mixed(random, old, new):
    """New sectors in the place of some old ones."""
    chance = random.choice([0, 0.3, 0.7, 0.95, 1])
    size = random.choice([len(old), len(new), max(len(old), len(new))])
    data = bytearray()
    for at in range(0, size, SECTOR):
        end = min(at + SECTOR, size)
        piece = (new if random.random() < chance else old)[at:end]
        data += piece + bytes(end - at - len(piece))
    return bytes(data)


class MemorySystem(System):
    """A file system that knows what is durable: `cut` is the one that a power cut leaves.

    Once `calls_left` calls that change something have been made, the next raises PowerCut.

    A sync of a file in `failing` raises: some of what was not synced is on the disk, and the rest
    never will be, though it is read as before and the next sync succeeds.

    It is a model: sectors are written whole, synced ones stay.
    """

    connection = Watched
    synchronous = "OFF"  # the model waits

    def __init__(self, names=None, database=None):
        self._names = dict(names or {})
        self._possible = [dict(self._names)]  # names that a power cut may leave
        self._files = {}
        self._next = 1000
        room = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, room, ignore_errors=True)
        self.index = Path(room) / "index"
        self._synced = database or Database()
        self._synced.write(self.index)
        self._removed = Database()  # what a power cut may bring back
        self._before = None  # the checkpoint that the power cut hits: the files before it
        self.calls_left = None
        self.failing = {}  # name of a file -> the chances of its failed sync

    def cut(self, random):
        names = random.choice(self._possible)
        survivors = {path: file.survivor(random) for path, file in names.items()}
        return MemorySystem(survivors, self._surviving(random))

    def _surviving(self, random):
        now, old = Database.of(self.index), self._synced
        removed = self._removed
        if removed.index is not None or removed.log is not None:
            # Each name is gone or not; whatever has been made since has none yet.
            return Database(
                removed.index if random.random() < 0.5 else None,
                removed.log if random.random() < 0.5 else None,
            )
        if self._before is not None:  # in a checkpoint, the log being on the disk
            index = mixed(random, self._before.index or b"", now.index)
            return Database(index, now.log or self._before.log)
        if now.log is None or old.log is None:
            log = random.choice([now.log, mixed(random, b"", now.log)]) if now.log else None
            return Database(now.index, log)
        log = mixed(random, old.log, now.log)
        if now.log[:32] != old.log[:32] and log:  # a new header is synced before what follows
            log = random.choice([old.log, now.log[:32] + log[32:]])
        return Database(now.index, log)

    def _watch(self, before, *, cut):
        """Look at what SQLite did: only a checkpoint, or making a database, writes the index."""
        after = Database.of(self.index)
        if after.index == before.index and after.log is not None:
            return
        if cut and before.index and self.calls_left == 0:
            self._before = before
            raise PowerCut
        self._synced = after

    def connect(self, path):
        connection = super().connect(self.index)
        connection.system = self
        return connection

    def own(self, folder):
        return self.open(folder / "lock")

    def open(self, path, *, direct=False):
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if path not in self._names:
            self._names[path] = MemoryFile()
            self._renamed()
        return self._descriptor(self._names[path])

    def close(self, descriptor):
        del self._files[descriptor]

    def size(self, descriptor):
        return len(self._files[descriptor].current)

    def stamp(self, file):
        if isinstance(file, Path) and file.name.startswith("index"):
            return super().stamp(self.index.with_name(file.name))
        found = self._names.get(file) if isinstance(file, Path) else self._files[file]
        return found and (0, id(found), len(found.current))

    def write(self, descriptor, buffers, offset):
        self._step()
        data = b"".join(buffers)
        file = self._files[descriptor]
        put(file.current, offset, data)
        at = 0
        while at < len(data):
            stop = min(len(data), at + SECTOR - (offset + at) % SECTOR)
            file.pending.append((offset + at, data[at:stop]))
            at = stop
        return len(data)

    def read(self, descriptor, buffers, offset):
        count = 0
        for buffer in buffers:
            data = self._files[descriptor].current[offset + count : offset + count + len(buffer)]
            buffer[: len(data)] = memoryview(data)
            count += len(data)
        return count

    def truncate(self, descriptor, size):
        self._step()
        resize(self._files[descriptor].current, size)
        self._files[descriptor].pending.append(size)

    def sync(self, descriptor):
        self._step()
        file = self._files[descriptor]
        named = [path.name for path, each in self._names.items() if each is file]
        random = next((self.failing.pop(name) for name in named if name in self.failing), None)
        file.durable = file.survivor(random, all=random is None).durable
        file.pending.clear()
        if random is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def remove(self, path):
        self._step()
        if path.name in ("index", "index-wal"):
            gone = Database.of(self.index)
            path = self.index.with_name(path.name)
            if path.exists():
                which = "index" if path == self.index else "log"
                self._removed = replace(self._removed, **{which: getattr(gone, which)})
                path.unlink()
                self._synced = Database.of(self.index)
        elif self._names.pop(path, None) is not None:
            self._renamed()

    def sync_folder(self, folder):
        self._step()
        self._possible = [dict(self._names)]
        self._removed = Database()

    def _step(self):
        if self.calls_left == 0:
            raise PowerCut
        self.calls_left = self.calls_left and self.calls_left - 1

    def _renamed(self):
        self._possible.append(dict(self._names))

    def _descriptor(self, file):
        self._next += 1
        self._files[self._next] = file
        return self._next


def resize(data, size):
    del data[size:]
    data.extend(bytes(size - len(data)))


def put(data, offset, piece):
    if len(data) < offset + len(piece):
        resize(data, offset + len(piece))
    data[offset : offset + len(piece)] = piece
