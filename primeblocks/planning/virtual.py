"""Virtual time: an event loop that jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import DeadlineError

__all__ = ["VirtualClock", "VirtualTimeLoop", "run_in_virtual_time"]

T = TypeVar("T")


class VirtualClock:
    """The time of the running event loop, as a `Clock`."""

    def now(self) -> float:
        """Return the seconds of the running loop's time."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Return when the running loop's time is `seconds` later."""
        if seconds > 0:
            await asyncio.sleep(seconds)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stops while a task can run, and then jumps to the next timer.

    All of asyncio works, timeouts included. The order of events depends only on the program. The
    loop does not know other threads: time jumps ahead while another thread works.
    """

    def __init__(self) -> None:
        self.virtual_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Return the virtual time, in seconds from the loop's start."""
        return self.virtual_s


class _Jump(selectors.DefaultSelector):
    """A selector that jumps to the next timer instead of waiting for a socket."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise DeadlineError(
                "every task waits and no timer is set, so the virtual time cannot advance. Give "
                "each wait a deadline, and do not use threads."
            )
        due_s = self._loop.virtual_s + timeout
        # Jump past it by more than rounding, because a timer that is not yet due does not run.
        self._loop.virtual_s = due_s + 4 * math.ulp(due_s)
        return events


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a `VirtualTimeLoop`, as `asyncio.run` would, and return its result.

    Waits take no real time. The loop runs in a thread of its own, because a notebook already runs
    an event loop.

    Raises:
        DeadlineError: every task waits and no timer is set.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = []

    async def noted() -> T:
        begun.append((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
        return await main

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                results.append(runner.run(noted()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="virtual time", daemon=True)
    try:
        thread.start()
        thread.join()
    except BaseException:  # Ctrl-C: the thread would go on alone.
        for loop, task in begun:
            with suppress(RuntimeError):  # The loop may have ended meanwhile.
                loop.call_soon_threadsafe(task.cancel)
        raise
    if errors:
        raise errors[0]
    return results[0]
