"""Locks that end with their process, and the files and sealed memory that they protect.

A reader holds a `FileLease` or a `SealedLease`. Each owns a `Hold`, an flock on an open file.
Writers leave a version unchanged while a reader has such a lock. `close()` ends a lease, and so
does the end of the process. The lock of a `SealedLease` also waits for the last tensor that uses
the mapped memory. A forked child drops its copies of its parent's locks.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ..errors import UnsupportedError, UsageError

__all__ = ["FileLease", "Hold", "SealedLease", "alone"]


@contextmanager
def alone(lock: threading.Lock, call: str) -> Iterator[None]:
    """Hold a lock of this process, or refuse the call if another call has the lock.

    Raises:
        UsageError: another call has the lock.
    """
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
    """A lock on an open file. It ends with this process, and `close` also closes the file.

    A forked child shares the lock and would keep it for life. So the child drops its copy at once,
    which does not end the lock of the parent.

    Args:
        fd: the descriptor of the open file. The lock owns it, and closes it if it raises.
        how: fcntl.LOCK_SH or fcntl.LOCK_EX. None takes no lock.

    Raises:
        BlockingIOError: another process has the lock.
        UnsupportedError: the file system does not support locks.
    """

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
        """Release the lock, even if a forked child that ran no Python shares it. Idempotent."""
        if self.fd >= 0 and self._is_locked:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        self._drop()

    def _drop(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class FileLease:
    """A committed file, open for reading. Writers leave it unchanged until `close`."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self.close = weakref.finalize(self, hold.close)

    @property
    def fd(self) -> int:
        """The descriptor to read from. It is -1 after `close`, and in a forked child."""
        return self._hold.fd


class SealedLease:
    """A committed version in sealed memory. Writers leave it unchanged until `close`.

    The memory is mapped for one use at a time. A tensor of a mapping keeps the version alive while
    the tensor exists.

    Args:
        take: returns a mapping in private pages, so that writes stay in this process.
        give: keeps a mapping for the next lease that needs one.
    """

    def __init__(
        self, hold: Hold, take: Callable[[], np.ndarray], give: Callable[[np.ndarray], object]
    ) -> None:
        self._take, self._state = take, _State(hold, give)
        self._mapped: UInt8[Tensor, " bytes"] | None = None
        self.close = weakref.finalize(self, self._state.close)

    def map(self) -> UInt8[Tensor, " bytes"]:
        """Return the version's bytes, as they were written. They are valid until `unmap`."""
        if self._mapped is None:
            mapping = self._take()
            whole = mapping[:]  # Ends with the last tensor.
            self._state.mapped += 1
            weakref.finalize(whole, self._state.unmapped, mapping).atexit = False
            with torch.inference_mode(False):  # Which counts no writes.
                self._mapped = torch.from_numpy(whole)
        return self._mapped

    def unmap(self, *, is_right: bool = True) -> None:
        """Forget the mapping. A wrong mapping, or a mapping that was written to, is not reused."""
        if self._mapped is not None:
            self._state.is_clean = is_right and self._mapped._version == 0
            self._mapped = None  # Where nobody keeps a tensor, this is its end.
            self._state.is_clean = False


class _State:
    """The state that outlives a lease while somebody keeps a tensor."""

    def __init__(self, hold: Hold, give: Callable[[np.ndarray], object]) -> None:
        self._hold, self._give = hold, give
        self.mapped, self.is_clean, self._is_closed = 0, False, False

    def unmapped(self, mapping: np.ndarray) -> None:
        self.mapped -= 1
        if self.is_clean:
            self._give(mapping)
        if self._is_closed and self.mapped == 0:
            self._hold.close()

    def close(self) -> None:
        self._is_closed = True
        if self.mapped == 0:
            self._hold.close()


@cache
def _holds() -> weakref.WeakSet[Hold]:
    """Return the locks of this process; after the first call every forked child drops them."""
    holds: weakref.WeakSet[Hold] = weakref.WeakSet()

    def drop_all() -> None:
        for hold in list(holds):
            hold._drop()

    os.register_at_fork(after_in_child=drop_all)
    return holds
