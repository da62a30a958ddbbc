"""A result that is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, Lock
from typing import Any, Generic, TypeVar

from ...errors import CancelledError, DeadlineError

__all__ = ["Batch", "Pending", "finish_all"]

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a `save` or `load` in progress: ask `done()`, `wait`, `await`, or `cancel`.

    A wait that ends at its deadline gives the operation up, as `cancel` does and as cancelling a
    task that awaits it does: afterwards the caller's buffers are neither read nor written any more.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._finished = False
        self._given_up = False
        self._busy = 0
        self._result: T | None = None
        self._error: BaseException | None = None
        self._then: list[Callable[[], object]] = []

    def done(self, *, within_s: float = 0.0) -> bool:
        """Whether `wait` would return, or raise, at once; sleeps until then, at most so long."""
        if within_s and not self._finished:
            with self._changed:
                self._changed.wait_for(lambda: self._finished, within_s)
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

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an asyncio task, without a thread; `asyncio.timeout` sets a deadline."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop ended before this operation did
                loop.call_soon_threadsafe(over.set)

        with self._changed:
            self._then.append(wake)
            if self._finished:
                wake()
        try:
            yield from over.wait().__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.wait(timeout_s=0)

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
                self._end()

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise `error`, once no other page of the batch is being copied."""
        with self._changed:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Give up once no copy is under way; each lasts as long as copying 16 MiB in memory."""
        self._given_up = True
        self._changed.wait_for(lambda: self._busy == 0)
        if not self._finished:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._finished = True
        self._changed.notify_all()
        for wake in self._then:
            wake()


class Batch(Generic[T]):
    """Pages that a caller handed over together: `pending` is over when each of them is.

    Args:
        result: makes the result of the batch from those of its pages.

    Attributes:
        parts: for each page, its bytes where they lie: one part, or several in a row.
        extras: packed attachments, by page; they follow it in its frame.
        fences: copies on a device wait for this work, which the caller gave to it before.
    """

    def __init__(self, pages: int, result: Callable[[list[T]], Any] = list) -> None:
        self.pending: Pending[Any] = Pending()
        self.parts: Sequence[Any] = ()
        self.extras: dict[int, bytes] = {}
        self.fences: dict[Any, Any] = {}
        self._lock = Lock()
        self._result = result
        self._results: list[T | None] = [None] * pages
        self._missing = pages
        if not pages:
            self.pending.finish(result([]))

    def finish(self, results: Iterable[tuple[int, T]]) -> None:
        """Set the results of pages, by their index; call once for each page."""
        over = False
        with self._lock:
            for index, result in results:
                self._results[index] = result
                self._missing -= 1
                over = self._missing == 0
        if over:
            self.pending.finish(self._result(self._results))  # type: ignore[arg-type]


def finish_all(results: Iterable[tuple[Batch[Any], int, Any]]) -> None:
    """Set the results of pages of several batches."""
    by_batch: dict[Batch[Any], list[tuple[int, Any]]] = {}
    for batch, index, result in results:
        by_batch.setdefault(batch, []).append((index, result))
    for batch, each in by_batch.items():
        batch.finish(each)
