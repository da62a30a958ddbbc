"""A result that is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Generic, TypeVar

from ...errors import CancelledError, DeadlineError

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a `save` or `load` in progress: ask `done()`, `wait`, or `cancel`.

    A wait that ends at its deadline gives the operation up, as `cancel` does: when either has
    returned, the caller's buffers are neither read nor written any more.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._finished = False
        self._given_up = False
        self._busy = 0
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._finished

    def wait(self, *, timeout_s: float) -> T:
        """Wait for the result and return it.

        Raises:
            DeadlineError: not ready within `timeout_s`; the operation is given up.
            CancelledError: the operation was cancelled.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._finished, timeout_s):
                self._give_up(DeadlineError(f"the page store took longer than {timeout_s} s"))
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def cancel(self) -> bool:
        """Give the operation up; return false if it was over. Pages that moved stay moved."""
        with self._changed:
            if self._finished:
                return False
            self._give_up(CancelledError("the caller cancelled this operation"))
            return True

    @contextmanager
    def buffers(self) -> Iterator[bool]:
        """Hold the caller's buffers for a copy; yield false if the operation was given up."""
        with self._changed:
            held = not self._given_up
            self._busy += held
        try:
            yield held
        finally:
            if held:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def finish(self, result: T) -> None:
        """Hand the result over; do nothing if the operation was given up."""
        with self._changed:
            if not self._finished:
                self._result = result
                self._finished = True
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise `error`, once no other page of the batch is being copied."""
        with self._changed:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Give up once no copy is under way; each lasts as long as copying one page in memory."""
        self._given_up = True
        self._changed.wait_for(lambda: self._busy == 0)
        if not self._finished:
            self._error = error
            self._finished = True
            self._changed.notify_all()
