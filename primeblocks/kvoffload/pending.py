"""A result that is on its way."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock
from typing import Generic, TypeVar

from ..errors import DeadlineError

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """What `save` and `load` return: ask `done()`, or `wait`.

    A wait that ends at its deadline gives the operation up: its buffer is not touched afterwards.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._finished = Event()
        self._abandoned = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._finished.is_set()

    def wait(self, *, timeout_s: float) -> T:
        """The result.

        Raises:
            DeadlineError: not ready within `timeout_s`; the operation is given up.
        """
        if not self._finished.wait(timeout_s):
            with self._lock:
                if not self._finished.is_set():
                    self._abandoned = True
                    self._error = DeadlineError(f"the page store took longer than {timeout_s} s")
                    self._finished.set()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def finish(self, result: T, *, before: Callable[[], None] | None = None) -> None:
        """Hand the result over, after running `before`; nothing happens if nobody waits."""
        with self._lock:
            if self._abandoned:
                return
            if before is not None:
                before()
            self._result = result
            self._finished.set()

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise `error`."""
        with self._lock:
            if not self._abandoned and not self._finished.is_set():
                self._error = error
                self._finished.set()
