"""The data file of a disk tier, its free frames, and all calls to the operating system."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import (
    CapacityError,
    CorruptionError,
    PlanError,
    PrimeblocksError,
    ShapeError,
    UnsupportedError,
)
from ..page import ALIGNMENT

__all__ = [
    "Answer",
    "DataFile",
    "Frames",
    "Place",
    "System",
    "full",
    "refusal",
    "refusing",
]

Answer = PrimeblocksError | OSError | None
_Call = Callable[[int, Any, int], int]  # `System.write` or `System.read`

_VECTOR = min(256, os.sysconf("SC_IOV_MAX"))  # buffers of one call


class System:
    """All calls to the file system. To test faults, pass a subclass whose methods raise OSError.

    Every method may raise OSError. Methods of the connection from `connect` may raise
    sqlite3.Error.
    """

    connection = sqlite3.Connection
    synchronous = "NORMAL"  # SQLite syncs only before and after a checkpoint.

    def own(self, folder: Path) -> int:
        """Make a folder and lock it. The lock ends when the descriptor closes or the process dies.

        Raises:
            BlockingIOError: another tier owns the folder.
            FileExistsError: the folder has files that have a tier's names, but do not come from a
                tier.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "lock"
        foreign = [name for name in ("index", "pages") if (folder / name).exists()]
        if foreign and not lock.exists():
            raise FileExistsError(
                f"{folder} contains {' and '.join(foreign)} of another application"
            )
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def open(self, path: Path, *, direct: bool = False) -> int:
        """Open a file to read and write, and make it if absent. `direct` adds O_DIRECT."""
        flags = os.O_CREAT | os.O_RDWR | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, 0o600)

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open a database for all threads of this process, and make the database if absent.

        Other processes cannot use the database meanwhile.
        """
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
        """Return a file's device, inode and size, or None if the path does not exist."""
        try:
            found = os.stat(file)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino, found.st_size

    def in_place(self, descriptor: int, path: Path) -> bool:
        """Whether `path` still names the file that is open as `descriptor`."""
        ours, there = self.stamp(descriptor), self.stamp(path)
        return ours is not None and there is not None and ours[:2] == there[:2]

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Write buffers one after the other. Return the number of bytes written."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Fill buffers in order. Return the number of bytes read, or 0 at the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Make all writes so far survive a power cut."""
        os.fdatasync(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Make the names of the files in a folder survive a power cut."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Place(NamedTuple):
    """The frame of a page in the data file, its length and its digest."""

    frame: int
    length: int
    digest: bytes


class DataFile:
    """A file of frames of `stride` bytes. Adjacent frames move in one call.

    Args:
        io: "direct" bypasses the page cache. "auto" does so if the file system allows it.

    Raises:
        PlanError: `io` is unknown.
        UnsupportedError: the file system has no direct I/O.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, stride: int, io: str, system: System) -> None:
        if io not in ("auto", "direct", "buffered"):
            raise PlanError(f'io must be "auto", "direct" or "buffered"; got {io!r}.')
        self._path = path
        self._stride = stride
        self._system = system
        descriptor = None if io == "buffered" else self._open_direct()
        if descriptor is None and io == "direct":
            raise UnsupportedError(
                f'the file system of {path} does not support direct I/O. Use io="auto" or '
                '"buffered".'
            )
        self.direct = descriptor is not None
        self.descriptor = system.open(path) if descriptor is None else descriptor

    def write(self, frames: Sequence[int], contents: Sequence[np.ndarray]) -> list[Answer]:
        """Write whole, aligned buffers into frames. Return None or an error for each."""
        return self._each(self._system.write, frames, contents)

    def read(self, frames: Sequence[int], into: Sequence[np.ndarray]) -> list[Answer]:
        """Fill whole, aligned buffers from frames. Return None or an error for each."""
        return self._each(self._system.read, frames, into)

    def frames(self) -> int:
        """Count the complete frames of the file."""
        return self._system.size(self.descriptor) // self._stride

    def shrink(self, frames: int) -> None:
        if self._system.size(self.descriptor) > frames * self._stride:
            self._system.truncate(self.descriptor, frames * self._stride)

    def flush(self) -> None:
        self._system.sync(self.descriptor)

    def close(self) -> None:
        self._system.close(self.descriptor)

    def _open_direct(self) -> int | None:
        descriptor = None
        try:
            descriptor = self._system.open(self._path, direct=True)
            self._system.read(descriptor, [np.frombuffer(mmap.mmap(-1, ALIGNMENT), np.uint8)], 0)
        except OSError as error:
            if descriptor is not None:
                self._system.close(descriptor)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return None
        return descriptor

    def _each(
        self, call: _Call, frames: Sequence[int], buffers: Sequence[np.ndarray]
    ) -> list[Answer]:
        """Move adjacent frames in one call. If that fails, move the rest frame by frame."""
        answers: list[Answer] = [None] * len(frames)
        for run in _runs(frames):
            done = 0
            if len(run) > 1:
                done, _ = self._transfer(call, frames[run[0]], [buffers[index] for index in run])
            for index in run[done:]:
                _, answers[index] = self._transfer(call, frames[index], [buffers[index]])
        return answers

    def _transfer(
        self, call: _Call, frame: int, buffers: Sequence[np.ndarray]
    ) -> tuple[int, Answer]:
        """Return the number of frames moved, and the error that stopped the move."""
        if any(buffer.nbytes < self._stride for buffer in buffers):
            return 0, ShapeError(f"a buffer needs {self._stride} bytes.")
        views = [buffer.data[: self._stride] for buffer in buffers]
        offset, done = frame * self._stride, 0
        while done < len(buffers) * self._stride:
            index, within = divmod(done, self._stride)
            rest = [views[index][within:], *views[index + 1 :]]
            try:
                count = call(self.descriptor, rest, offset + done)
            except OSError as error:
                return done // self._stride, error
            if count == 0:
                return done // self._stride, CorruptionError(
                    f"{self._path} ends within frame {frame + index}. Put the page again."
                )
            done += count
        return len(buffers), None


def _runs(frames: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of adjacent frames."""
    order = sorted(range(len(frames)), key=frames.__getitem__)
    for _, run in groupby(enumerate(order), lambda each: frames[each[1]] - each[0]):
        indices = [index for _, index in run]
        for start in range(0, len(indices), _VECTOR):
            yield indices[start : start + _VECTOR]


class Frames:
    """The free frames of a file. A head sweeps forward over them, and starts again at the front.

    Free frames are claimed in the order of the sweep. So pages written together are adjacent if
    there is room, and a live page never moves. The fence is the frame at which the disk had no
    room. Frames behind it are claimed last.

    Source: the threaded log of F2FS (FAST 2015).
    """

    def __init__(self, count: int) -> None:
        self._taken = bytearray(count)
        self._head = 0
        self._fence = count  # the disk had no room behind it
        self.free = count

    def adopt(self, frames: Sequence[int]) -> None:
        """Mark frames as taken, oldest first. The sweep continues after the last of them."""
        for frame in frames:
            self._taken[frame] = 1
        self.free -= len(frames)
        self._head = frames[-1] + 1 if frames else 0

    def claim(self, count: int) -> list[int]:
        """Claim up to `count` free frames, in the order of the sweep.

        A claim behind the fence removes the fence, because a write there shows whether there is
        room now.
        """
        fenced = self._fence < len(self._taken)
        near = self._taken.count(0, 0, self._fence) if fenced else self.free
        claimed = self._sweep(min(count, near), end=self._fence)
        more = min(count - len(claimed), self.free)
        if more:
            self._fence = len(self._taken)
        return claimed + self._sweep(more, end=len(self._taken))

    def _sweep(self, count: int, *, end: int) -> list[int]:
        """Claim `count` frames before `end`, where at least as many must be free."""
        claimed: list[int] = []
        while len(claimed) < count:
            start = self._taken.find(0, self._head, end)
            if start < 0:
                self._head = 0
                continue
            stop = min(start + count - len(claimed), end)
            found = self._taken.find(1, start, stop)
            stop = stop if found < 0 else found
            self._taken[start:stop] = b"\1" * (stop - start)
            self.free -= stop - start
            self._head = stop
            claimed += range(start, stop)
        return claimed

    def release(self, frames: Sequence[int]) -> None:
        for frame in frames:
            assert self._taken[frame]
            self._taken[frame] = 0
        self.free += len(frames)

    def fence(self, frames: int) -> None:
        """Start to sweep at the front, and claim frames after the first `frames` last."""
        self._head = 0
        self._fence = min(frames, len(self._taken))

    def end(self) -> int:
        return self._taken.rfind(1) + 1

    def clear(self) -> None:
        self._taken = bytearray(len(self._taken))
        self.free = len(self._taken)
        self.fence(self.free)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def full(error: OSError) -> bool:
    """Whether the error says that the file system is full."""
    return error.errno in _FULL


def refusal(error: PrimeblocksError | OSError, path: Path) -> PrimeblocksError | OSError:
    """Return the error to report: CapacityError if the file system is full, else `error`."""
    if isinstance(error, OSError) and full(error):
        return CapacityError(f"no space for pages in {path}: {error}. Free some disk space.")
    return error


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Raise errors of the file system as `refusal` translates them."""
    try:
        yield
    except OSError as error:
        raise refusal(error, path) from error
