"""Locks on files that end with their process, and a blob that a reader holds under one."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from functools import cache

from jaxtyping import UInt8
from torch import Tensor

__all__ = ["Hold", "Lease"]


class Hold:
    """A lock on an open file, which it closes at its end. It ends with this process.

    A forked child has the same lock, and would keep it as long as it lives: it lets go of it at
    once, and what it does with its copy of this object does nothing to the lock.

    Args:
        how: fcntl.LOCK_SH or fcntl.LOCK_EX. None takes no lock.

    Raises:
        BlockingIOError: another one has it. `fd` is closed.
    """

    def __init__(self, fd: int, how: int | None) -> None:
        self._fd = fd
        try:
            if how is not None:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise
        _holds().add(self)

    def close(self) -> None:
        """Let go, also where a child of a fork that ran no Python has a copy. Twice is fine."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._drop()

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Lease:
    """A committed blob, unchanged until closed. Private pages: writing to it harms nobody.

    `release` gets the blob at the end, unless it was written to: see `own`.
    """

    def __init__(
        self,
        blob: UInt8[Tensor, " bytes"],
        hold: Hold,
        release: Callable[[UInt8[Tensor, " bytes"]], object],
    ) -> None:
        self.blob = blob
        self._owned: list[bool] = []
        self.close = weakref.finalize(self, _end_lease, blob, hold, release, self._owned)

    def own(self) -> None:
        """Say that the blob will be written to, so that nobody takes it for the file later."""
        self._owned.append(True)


def _end_lease(
    blob: UInt8[Tensor, " bytes"],
    hold: Hold,
    release: Callable[[UInt8[Tensor, " bytes"]], object],
    owned: list[bool],
) -> None:
    hold.close()
    if not owned:
        release(blob)


@cache
def _holds() -> weakref.WeakSet[Hold]:
    """Those of this process; asked for the first time, a forked child drops them from then on."""
    holds: weakref.WeakSet[Hold] = weakref.WeakSet()

    def drop_all() -> None:
        for hold in list(holds):
            hold._drop()

    os.register_at_fork(after_in_child=drop_all)
    return holds
