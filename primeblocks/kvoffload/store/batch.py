"""Pages that a caller handed over together."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, TypeVar

from .pending import Pending

__all__ = ["Batch"]

T = TypeVar("T")


class Batch(Generic[T]):
    """One result for several pages: `pending` is over when each of them is.

    Args:
        result: makes the result of the batch from those of its pages.
    """

    def __init__(self, pages: int, result: Callable[[list[T]], Any] = list) -> None:
        self.pending: Pending[Any] = Pending()
        self._lock = Lock()
        self._result = result
        self._results: list[T | None] = [None] * pages
        self._missing = pages
        if not pages:
            self.pending.finish(result([]))

    def finish(self, index: int, result: T) -> None:
        """Set the result of page `index`; call once for each."""
        with self._lock:
            self._results[index] = result
            self._missing -= 1
            over = self._missing == 0
        if over:
            self.pending.finish(self._result(self._results))  # type: ignore[arg-type]
