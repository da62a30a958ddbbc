"""Files in memory that a power cut can hit: what was not synced is lost in part, in any order."""

import errno
import os
from dataclasses import dataclass, field

from primeblocks.kvoffload.disk import System

SECTOR = 512


class PowerCut(BaseException):
    """No error that a tier could handle."""


@dataclass(eq=False)
class MemoryFile:
    durable: bytes = b""
    current: bytearray = field(default_factory=bytearray)
    pending: list = field(default_factory=list)  # (offset, bytes) or a size, oldest first

    def survivor(self, random, remains, *, all=False):
        """What a power cut leaves: some of the sectors and sizes that were not synced, or all.

        Where the file grew and a sector was lost, the disk still has what was there before.
        """
        data = bytearray(self.durable)
        chance = 1 if all else random.choice([0, 0.3, 0.7, 0.95, 1])
        for change in self.pending:
            if not all and random.random() >= chance:
                continue
            if isinstance(change, int):
                resize(data, change, remains)
            else:
                put(data, *change, remains)
        return MemoryFile(bytes(data), bytearray(data))


class MemorySystem(System):
    """A file system that knows what is durable: `cut` is the one that a power cut leaves.

    Once `calls_left` calls that change something have been made, the next raises PowerCut.

    A sync of a file in `failing` raises: some of what was not synced is on the disk, and the rest
    never will be, though it is read as before and the next sync succeeds.

    It is a model: sectors are written whole, synced ones stay, a rename may survive before the
    contents of the file.
    """

    def __init__(self, names=None, remains=b""):
        self._names = dict(names or {})
        self._remains = remains  # of the file that was replaced last
        self._possible = [dict(self._names)]  # names that a power cut may leave
        self._files = {}
        self._next = 1000
        self.calls_left = None
        self.failing = {}  # name of a file -> the chances of its failed sync

    def cut(self, random):
        names = random.choice(self._possible)
        survivors = {path: file.survivor(random, self._remains) for path, file in names.items()}
        return MemorySystem(survivors, self._remains)

    def own(self, folder):
        return self._descriptor(MemoryFile())

    def open(self, path, *, direct=False, truncate=False):
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if path not in self._names:
            self._names[path] = MemoryFile()
            self._renamed()
        descriptor = self._descriptor(self._names[path])
        if truncate:
            self.truncate(descriptor, 0)
        return descriptor

    def close(self, descriptor):
        del self._files[descriptor]

    def size(self, descriptor):
        return len(self._files[descriptor].current)

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
        file.durable = file.survivor(random, self._remains, all=random is None).durable
        file.pending.clear()
        if random is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def replace(self, source, target):
        self._step()
        if target in self._names:
            self._remains = bytes(self._names[target].current)
        self._names[target] = self._names.pop(source)
        self._renamed()

    def remove(self, path):
        self._step()
        if self._names.pop(path, None) is not None:
            self._renamed()

    def sync_folder(self, folder):
        self._step()
        self._possible = [dict(self._names)]

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


def resize(data, size, remains=b""):
    del data[size:]
    grown = remains[len(data) : size]
    data.extend(grown + bytes(size - len(data) - len(grown)))


def put(data, offset, piece, remains=b""):
    if len(data) < offset + len(piece):
        resize(data, offset + len(piece), remains)
    data[offset : offset + len(piece)] = piece
