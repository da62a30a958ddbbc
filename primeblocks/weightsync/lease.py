"""Leases of readers: a lock that ends with its process, and an open file under one."""

from __future__ import annotations

import fcntl
import math
import os
import weakref
from functools import cache
from typing import Protocol

from ..errors import UnsupportedError

__all__ = ["FileLease", "Hold", "Lease"]


class Lease(Protocol):
    """A version that its writers leave alone until it is closed, or until a time.

    Attributes:
        until: the end, by time.monotonic; infinity where it ends with this process.
    """

    @property
    def until(self) -> float: ...

    def close(self) -> None:
        """Let go. Twice is fine."""
        ...


class Hold:
    """A lock on an open file, which it closes at its end. It ends with this process.

    A forked child shares the lock, and would keep it as long as it lives: it lets go of it at
    once, and its copy of this object does nothing to the lock.

    Args:
        how: fcntl.LOCK_SH or fcntl.LOCK_EX; None takes no lock.

    Raises, with `fd` closed:
        BlockingIOError: another one has it.
        UnsupportedError: the file system has no locks.
    """

    until = math.inf

    def __init__(self, fd: int, how: int | None) -> None:
        self.fd, self._is_locked = fd, how is not None
        _holds().add(self)  # Before: another thread may fork.
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
                "or use a directory elsewhere."
            ) from error

    def close(self) -> None:
        """Let go, even where a forked child that ran no Python has a copy. Twice is fine."""
        if self.fd >= 0 and self._is_locked:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        self._drop()

    def _drop(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class FileLease:
    """A committed file, open and unchanged by its writers until closed."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self.close = weakref.finalize(self, hold.close)

    @property
    def fd(self) -> int:
        """The descriptor to read from; -1 once it is closed, and in a forked child."""
        return self._hold.fd


@cache
def _holds() -> weakref.WeakSet[Hold]:
    """Return the locks of this process; after the first call every forked child drops them."""
    holds: weakref.WeakSet[Hold] = weakref.WeakSet()

    def drop_all() -> None:
        for hold in list(holds):
            hold._drop()

    os.register_at_fork(after_in_child=drop_all)
    return holds
