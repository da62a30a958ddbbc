"""Locks that allow one call at a time, and locks of files, which end with their process."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from ..errors import UnsupportedError, UsageError

__all__ = ["Hold", "Mapped", "alone"]


@contextmanager
def alone(lock: threading.Lock, call: str) -> Iterator[None]:
    """Hold a lock of this process, or refuse the call with UsageError if another call has it."""
    if not lock.acquire(blocking=False):
        raise UsageError(
            f"{call} was called while another call of the same object is under way. This call "
            "changed nothing. Wait for that call, and use the object from one thread."
        )
    try:
        yield
    finally:
        lock.release()


class Hold:
    """A lock on an open file. It ends at `close`, which also closes the file, or with this process.

    A forked child shares the lock and would keep it until the child ends. So the child drops its
    copy at once, which does not end the lock of the parent.

    Args:
        fd: the descriptor of the open file. The `Hold` owns the file, and closes it if this call
            raises. `fd` is -1 after `close`, and in a forked child.
        how: fcntl.LOCK_SH or fcntl.LOCK_EX. With None, no lock is taken.

    Raises:
        BlockingIOError: another process has the lock.
        UnsupportedError: the file system refuses locks.
    """

    def __init__(self, fd: int, how: int | None) -> None:
        self.fd, self._is_locked = fd, how is not None
        _holds().add(self)  # Before the lock, because another thread may fork.
        try:
            if how is not None:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            self._drop()
            raise
        except OSError as error:
            self._drop()
            raise UnsupportedError(
                f"the file system refuses flock: {error}. Mount it with locks (Lustre: -o flock), "
                "or use a directory on another file system."
            ) from error

    def close(self) -> None:
        # Unlock first, because a forked child that ran no Python code may share the lock.
        if self.fd >= 0 and self._is_locked:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        self._drop()

    def _drop(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Mapped:
    """Mappings of sealed memory, and its lock. After `close`, the last tensor ends the lock."""

    def __init__(self, hold: Hold, give: Callable[[np.ndarray], object]) -> None:
        self._hold, self._give = hold, give
        self._count, self.is_clean, self._is_closed = 0, False, False

    def add(self, mapping: np.ndarray) -> np.ndarray:
        """Return a view of a new mapping, which is used until the last tensor of the view ends."""
        view = mapping[:]
        self._count += 1
        weakref.finalize(view, self._unmapped, mapping).atexit = False
        return view

    def close(self) -> None:
        self._is_closed = True
        if self._count == 0:
            self._hold.close()

    def _unmapped(self, mapping: np.ndarray) -> None:
        self._count -= 1
        if self.is_clean:
            self._give(mapping)
        if self._is_closed and self._count == 0:
            self._hold.close()


@cache
def _holds() -> weakref.WeakSet[Hold]:
    """Return the locks of this process. After the first call, every forked child drops them."""
    holds: weakref.WeakSet[Hold] = weakref.WeakSet()

    def drop_all() -> None:
        for hold in list(holds):
            hold._drop()

    os.register_at_fork(after_in_child=drop_all)
    return holds
