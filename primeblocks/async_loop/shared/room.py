"""Waiting for room in a shared arena, and for what comes into it: every wait has a deadline."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np

from ...errors import ClosedError, DeadlineError, UsageError
from ..clock import Clock
from .arena import Arena, Head, State, Word
from .file import SharedFile

__all__ = ["Held", "Room", "Steps", "run", "run_async"]

T = TypeVar("T")
Steps = Generator[float, None, T]  # Yields how many seconds to pause.

_FIRST_PAUSE_S, _LAST_PAUSE_S = 1e-4, 5e-3
_LOCK_S = 1.0  # Who has the table locked longer than microseconds is stopped.
_LOOK_S = 0.1  # A death changes nothing that others see: look for one this often.


class Held(NamedTuple):
    """The entries of an arena at one moment.

    Args:
        ready: entries that may be taken, oldest first.
        stuck: whether no entry can be added before one is removed.
    """

    ready: np.ndarray
    stuck: bool


class Room:
    """An arena as one process uses it. Its methods are steps: run them, or `yield from` them.

    Raises:
        DeadlineError: from all steps: what they wait for did not come in time.
        ClosedError: the arena was removed, or closed in this process.
        UsageError: it was opened before a fork.
    """

    def __init__(self, file: SharedFile, arena: Arena, clock: Clock) -> None:
        self.arena, self._file, self._clock = arena, file, clock

    def enter(self, size: int, deadline: float) -> Steps[int]:
        """Wait for room for so many bytes, behind those that came before. Return the entry."""
        arena = self.arena
        index: int | None = None
        try:
            while True:
                yield from self._lock(deadline)
                with self._locked():
                    if index is None:
                        index = arena.claim(size)
                    self._admit()
                    if index is not None and arena.word(index, Word.STATE) == State.WRITING:
                        return index
                    seen = arena.head(Head.CHANGES)
                yield from self.pause(seen, deadline, "room in the buffer")
        except BaseException:
            if index is not None:
                arena.leave(index)
            raise

    def publish(self, index: int, deadline: float) -> Steps[None]:
        """Let an entry be seen."""
        yield from self._lock(deadline)
        with self._locked():
            self.arena.publish(index)

    def become_taker(self, deadline: float) -> Steps[None]:
        """Wait until no other thread or process takes."""
        self._check()
        while not self.arena.try_lock_taker():
            if self._clock.now() >= deadline:
                raise DeadlineError("another process or thread took groups all the time")
            yield _LAST_PAUSE_S

    def look(self, deadline: float) -> Steps[Held]:
        """Return what is there, and free what dead processes left."""
        arena = self.arena
        yield from self._lock(deadline)
        with self._locked():
            arena.sweep()
            stuck = arena.admit() and not len(arena.entries(State.WRITING))
            ready = arena.entries(State.READY)
            ages = arena.words(ready, Word.OLDEST_VERSION)
            order = np.lexsort((arena.words(ready, Word.ARRIVAL), ages))
        return Held(ready[order], stuck)

    def remove(self, indices: np.ndarray | list[int], deadline: float) -> Steps[None]:
        """Free entries that are ready: all of them, or none."""
        yield from self._lock(deadline)
        with self._locked():
            self.arena.remove(indices)

    def shut(self) -> Steps[None]:
        """Remove the file's name, and end all waits."""
        yield from self._lock(self._clock.now())
        with self._locked():
            self.arena.shut()

    def pause(self, seen: int, deadline: float, what: str) -> Steps[None]:
        """Pause until the arena has changed since `seen`, or a death may have gone by unseen."""
        now, pause_s = self._clock.now(), _FIRST_PAUSE_S
        if now >= deadline:
            raise DeadlineError(f"{what} did not come in time")
        until = min(deadline, now + _LOOK_S)
        while self.arena.head(Head.CHANGES) == seen and now < until:
            yield min(pause_s, until - now)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            now = self._clock.now()

    def _admit(self) -> bool:
        """Let in who waits; who died makes room first. Return whether any still wait."""
        while self.arena.admit():
            if not self.arena.sweep():
                return True
        return False

    def _lock(self, deadline: float) -> Steps[None]:
        self._check()
        until, pause_s = max(deadline, self._clock.now() + _LOCK_S), _FIRST_PAUSE_S
        while not self.arena.try_lock():
            if self._clock.now() >= until:
                raise DeadlineError(
                    f"the table of {self._file.path} was locked all the time: is a process stopped?"
                )
            yield pause_s
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.arena.unlock()

    def _check(self) -> None:
        if self._file.inherited:
            raise UsageError("a fork cannot use what its parent opened. Attach to it there.")
        if not self._file.close.alive:
            raise ClosedError(f"{self._file.path} was closed in this process")
        if self.arena.head(Head.CLOSED):
            raise ClosedError(f"{self._file.path} was unlinked")


def run(steps: Steps[T]) -> T:
    """Take steps, blocking the thread in their pauses."""
    try:
        while True:
            time.sleep(next(steps))
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


async def run_async(steps: Steps[T], clock: Clock) -> T:
    """Take steps, with others running in their pauses; they end where this is cancelled."""
    try:
        while True:
            await clock.sleep(next(steps))
    except StopIteration as end:
        return end.value
    finally:
        steps.close()
