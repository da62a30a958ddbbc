"""Finished groups on their way to the trainer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..errors import UsageError
from .clock import Clock, MonotonicClock, within
from .rollout import Group
from .staleness import StalenessPolicy

__all__ = ["RolloutBuffer"]


class RolloutBuffer:
    """Holds at most `capacity` groups, oldest first, and hands each out once.

    Belongs to one event loop.

    Args:
        capacity: groups that fit; a full buffer makes `put` wait.
        staleness: the bound that `take` keeps.
        clock: the time of the deadlines.

    Raises:
        UsageError: the capacity is not positive.
    """

    def __init__(
        self, *, capacity: int, staleness: StalenessPolicy, clock: Clock | None = None
    ) -> None:
        if capacity < 1:
            raise UsageError(f"capacity must be at least 1 group; got {capacity}")
        self.capacity = capacity
        self.staleness = staleness
        self._clock = MonotonicClock() if clock is None else clock
        self._groups: deque[Group] = deque()
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._groups)

    async def put(self, group: Group, *, timeout_s: float) -> None:
        """Add a group; wait while the buffer is full.

        Raises:
            DeadlineError: it stayed full; the group was not added.
        """
        await within(
            self._put(group), timeout_s=timeout_s, clock=self._clock, what="room in the buffer"
        )

    async def take(
        self,
        count: int,
        *,
        version: int,
        timeout_s: float,
        on_drop: Callable[[Group], None] | None = None,
        unless: asyncio.Future[BaseException] | None = None,
    ) -> tuple[Group, ...]:
        """Remove `count` groups that the policy `version` may train on, oldest first.

        Groups that are too old are removed as well, so none of them can ever be trained on.

        Args:
            on_drop: called with each of those, at once: `take` may be waiting for what the
                caller starts in their place.
            unless: a future whose result is an error; it ends the wait.

        Raises:
            DeadlineError: there were not enough in time; only stale groups were removed.
            UsageError: more groups are asked for than can be held.
        """
        if not 1 <= count <= self.capacity:
            raise UsageError(f"cannot take {count} groups of a buffer that holds {self.capacity}")
        return await within(
            self._take(count, version, on_drop),
            timeout_s=timeout_s,
            clock=self._clock,
            what=f"a batch of {count} groups",
            unless=unless,
        )

    async def _put(self, group: Group) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._groups) < self.capacity)
            self._groups.append(group)
            self._changed.notify_all()

    async def _take(
        self, count: int, version: int, on_drop: Callable[[Group], None] | None
    ) -> tuple[Group, ...]:
        def ready() -> bool:
            for group in list(self._groups):
                if self.staleness.admits(group, version=version):
                    continue
                self._groups.remove(group)  # one by one: `on_drop` may count what is left
                self._changed.notify_all()  # there is room now
                if on_drop is not None:
                    on_drop(group)
            return len(self._groups) >= count

        async with self._changed:
            await self._changed.wait_for(ready)
            self._changed.notify_all()
            return tuple(self._groups.popleft() for _ in range(count))
