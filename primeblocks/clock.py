"""Clocks that callers pass as arguments, and a wait with a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from .errors import DeadlineError

__all__ = ["Clock", "MonotonicClock", "within"]

T = TypeVar("T")

# Real seconds that a cancelled task gets to clean up after itself before it is left behind.
_CLEANUP_S = 1.0


class Clock(Protocol):
    """A clock that returns the time and can sleep. For tests, pass a simulated clock."""

    def now(self) -> float:
        """Return the time in seconds since an arbitrary origin. The time never decreases."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def within(
    awaitable: Awaitable[T],
    *,
    timeout_s: float,
    clock: Clock,
    what: str,
    unless: "asyncio.Future[BaseException] | None" = None,
    why: Callable[[], str] = str,
) -> T:
    """Wait for `awaitable` until a deadline, or until `unless` is done.

    If `awaitable` is not done when the wait ends, it is cancelled and gets one second to clean up.
    If `awaitable` and `unless` are done at the same time, only the result or error of `awaitable`
    counts.

    Args:
        what: a name of the awaited operation, for the error message.
        unless: a future whose *result* is an exception. If `unless` is done before `awaitable`,
            the function raises the result of `unless`.
        why: a function that returns the end of the error message.

    Raises:
        DeadlineError: `timeout_s` passed before `awaitable` or `unless` was done.
    """
    task = asyncio.ensure_future(awaitable)
    timer = asyncio.ensure_future(clock.sleep(timeout_s))
    others: set[asyncio.Future] = {timer} if unless is None else {timer, unless}
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if unless is not None and unless.done():
            raise unless.result()
        raise DeadlineError(f"{what} did not end within {timeout_s:g} s{why()}")
    finally:
        timer.cancel()
        await _cancel(task)


async def _cancel(task: "asyncio.Future") -> None:
    if task.done():
        return
    task.cancel()
    await asyncio.wait({task}, timeout=_CLEANUP_S)
    # A late result is discarded, but asyncio warns of errors that were never retrieved.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
