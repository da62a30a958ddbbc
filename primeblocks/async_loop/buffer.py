"""Finished groups on their way to the trainer."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from ..errors import UsageError
from .clock import Clock, MonotonicClock, within
from .rollout import Group
from .staleness import StalenessPolicy

__all__ = ["Batch", "RolloutBuffer"]


@dataclass(frozen=True, eq=False)
class Batch:
    """What `take` returned: groups to train on, and those that were too old for it."""

    groups: tuple[Group, ...]
    dropped: tuple[Group, ...]


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
        unless: asyncio.Future[BaseException] | None = None,
    ) -> Batch:
        """Remove `count` groups that the policy `version` may train on, oldest first.

        Groups that are too old are removed as well and returned as dropped, so none of them can
        ever be trained on.

        Args:
            unless: a future whose result is an error; it ends the wait.

        Raises:
            DeadlineError: there were not enough in time; nothing was removed but the stale.
            UsageError: more groups are asked for than can be held.
        """
        if not 1 <= count <= self.capacity:
            raise UsageError(f"cannot take {count} groups of a buffer that holds {self.capacity}")
        return await within(
            self._take(count, version),
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

    async def _take(self, count: int, version: int) -> Batch:
        dropped: list[Group] = []

        def ready() -> bool:
            old = [g for g in self._groups if not self.staleness.admits(g, version=version)]
            if old:
                dropped.extend(old)
                self._groups = deque(g for g in self._groups if g not in old)
                # There is room now, also for those whose notification came before this.
                self._changed.notify_all()
            return len(self._groups) >= count

        async with self._changed:
            await self._changed.wait_for(ready)
            groups = tuple(self._groups.popleft() for _ in range(count))
            self._changed.notify_all()
        return Batch(groups, tuple(dropped))
