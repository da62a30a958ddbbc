"""The buffer of finished groups, between generation and the trainer.

A group enters by `put` and leaves by `take`, which returns it or drops it as stale. If the buffer
is full, `put` waits, and its group waits with it. A waiting group can be taken like any other. So a
batch can be complete even if its groups do not fit into the buffer together. Room goes to waiting
groups in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from ..clock import Clock, MonotonicClock, within
from ..errors import CapacityError, DeadlineError, UsageError, check_counts
from ..rollout import Group
from .staleness import StalenessPolicy, staleness

__all__ = ["RolloutBuffer"]


class RolloutBuffer:
    """A bounded buffer of finished groups, which returns each group once, the oldest first.

    The oldest group has the lowest `oldest_version`. If several groups have the lowest version, the
    group that was put first is the oldest. Use a buffer from one event loop.

    Args:
        capacity: the largest number of groups. If the buffer is full, `put` waits.
        capacity_bytes: the largest total size of the groups (`Group.nbytes`), in bytes. None means
            unlimited.
        staleness: the staleness policy that `take` applies.
        clock: the clock that measures the deadlines.

    Raises:
        UsageError: `capacity` or `capacity_bytes` is not positive.
    """

    def __init__(
        self,
        *,
        capacity: int,
        staleness: StalenessPolicy,
        capacity_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_counts(capacity=capacity)
        if capacity_bytes is not None:
            check_counts(capacity_bytes=capacity_bytes)
        self.capacity, self.capacity_bytes = capacity, capacity_bytes
        self.staleness = staleness
        self._clock = MonotonicClock() if clock is None else clock
        # The value is a future if the group waits for room.
        self._held: dict[Group, asyncio.Future[None] | None] = {}
        self._new: list[Group] = []  # Groups that the running `take` has not looked at.
        self._held_bytes = self._waiting = 0
        self._stale = Counter[int]()  # Groups that the last `take` dropped, by oldest version.
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """The number of groups in the buffer, without groups that wait for room."""
        return len(self._held) - self._waiting

    async def put(self, group: Group, *, timeout_s: float) -> None:
        """Add a group. Wait until the buffer has room, or until `take` takes the waiting group.

        Raises:
            DeadlineError: the buffer stayed full. The group was not added.
            CapacityError: the group alone is larger than `capacity_bytes`.
        """
        if self.capacity_bytes is not None and group.nbytes > self.capacity_bytes:
            raise CapacityError(
                f"a group of {group.nbytes:,} bytes does not fit a buffer of "
                f"{self.capacity_bytes:,} bytes. Raise capacity_bytes."
            )
        self._new.append(group)
        self._arrived.set()
        if not self._waiting and self._fits(group):
            self._enter(group)
            return
        entered = asyncio.get_running_loop().create_future()
        self._held[group] = entered
        self._waiting += 1
        try:
            await within(
                entered,
                timeout_s=timeout_s,
                clock=self._clock,
                what="the wait for room in the buffer",
            )
        except BaseException as error:
            if group in self._held:  # It may have got room while this wait ended.
                self._remove(group)
            elif isinstance(error, DeadlineError):  # `take` removed the group meanwhile.
                return
            raise

    async def take(
        self,
        count: int,
        *,
        version: int,
        timeout_s: float,
        in_flight: Callable[[], Iterable[int]] = tuple,
        on_drop: Callable[[Group], None] | None = None,
        unless: asyncio.Future[BaseException] | None = None,
    ) -> tuple[Group, ...]:
        """Remove and return `count` groups that the policy `version` may train on, oldest first.

        If `on_stale` is "drop" or "wait", `take` also removes stale groups. If `on_stale` is
        "mask", `take` removes stale tokens from `loss_mask`.

        Args:
            in_flight: a function that returns the oldest version of each group that is being
                generated. Pass `in_flight` if `on_stale` is "wait".
            on_drop: a function that is called immediately with each group that is removed and not
                returned.
            unless: a future whose result is an error, which `take` raises when the future is done.

        Raises:
            DeadlineError: no batch was ready within `timeout_s`. The call removed only stale
                groups.
            UsageError: `count` is not between 1 and the capacity, or a group has a version later
                than `version`. If you pass `on_drop`, `take` first removes all groups that have a
                later version.
        """
        if not 1 <= count <= self.capacity:
            raise UsageError(
                f"cannot take {count} groups from a buffer with a capacity of {self.capacity} "
                "groups"
            )
        self._new, self._stale = list(self._held), Counter()
        ready = partial(self._is_ready, count, version, in_flight, on_drop)
        end, left_s = self._clock.now() + timeout_s, timeout_s
        while True:
            await within(
                self._until(ready),
                timeout_s=left_s,
                clock=self._clock,
                what=f"the wait for a batch of {count} groups",
                unless=unless,
                why=lambda: self._lacks(count, version),
            )
            # Groups leave here, and not before, because a cancelled wait must not lose them.
            if ready():
                break
            left_s = end - self._clock.now()  # Another call took groups meanwhile.
        oldest = sorted(self._held, key=lambda group: group.oldest_version)[:count]
        for group in oldest:
            self._remove(group)
        taken = (self.staleness.trainable(group, version=version) for group in oldest)
        return tuple(group for group in taken if group is not None)

    def look_again(self) -> None:
        """Let a waiting `take` repeat its checks, after groups in flight have changed. Local."""
        self._arrived.set()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._arrived.clear()
            await self._arrived.wait()

    def _is_ready(
        self,
        count: int,
        version: int,
        in_flight: Callable[[], Iterable[int]],
        on_drop: Callable[[Group], None] | None,
    ) -> bool:
        """Drop new groups that are stale. Return whether a batch is ready."""
        policy = self.staleness
        new, self._new = self._new, []
        later = [g for g in new if g in self._held and g.newest_version > version]
        if later:
            if on_drop is not None:
                for group in later:
                    self._remove(group)
                    on_drop(group)
            staleness(later[0], version=version)  # Raises.
        for group in new:
            if group in self._held and policy.trainable(group, version=version) is None:
                self._remove(group)  # One by one, because `on_drop` may count the other groups.
                self._stale[group.oldest_version] += 1
                if on_drop is not None:
                    on_drop(group)
        if len(self._held) < count:
            return False
        finished = [group.oldest_version for group in self._held]
        return policy.ready(finished, in_flight(), count=count, version=version)

    def _lacks(self, count: int, version: int) -> str:
        """Say why there was no batch, for an error message. Local."""
        stale, bound = self._stale, self.staleness.max_off_policy_steps
        found = f": {len(self._held)} groups were finished."
        if self._waiting and len(self._held) < count:
            found += (
                f" {self._waiting} of them waited for room, and count in max_in_flight. Raise "
                f"capacity_bytes={self.capacity_bytes}, or make max_in_flight at least batch_size."
            )
        if len(self._held) >= count:
            found += f" on_stale={self.staleness.on_stale!r} waited for older groups in flight."
        if stale:
            found += (
                f" {stale.total()} other groups were dropped, because their oldest policies are "
                f"{min(stale)} to {max(stale)}, but max_off_policy_steps={bound} lets policy "
                f"{version} train on policies from {version - bound} on. Check the versions that "
                "generate records, and that publish reaches the engine, or raise the bound."
            )
        return found

    def _fits(self, group: Group) -> bool:
        bound = self.capacity_bytes
        return len(self) < self.capacity and (
            bound is None or self._held_bytes + group.nbytes <= bound
        )

    def _bytes_of(self, group: Group) -> int:
        return 0 if self.capacity_bytes is None else group.nbytes

    def _enter(self, group: Group) -> None:
        self._held[group] = None
        self._held_bytes += self._bytes_of(group)

    def _remove(self, group: Group) -> None:
        """Remove a group, and give its room to waiting groups in the order of their arrival."""
        waits = self._held.pop(group)
        if waits is None:
            self._held_bytes -= self._bytes_of(group)
        else:
            self._waiting -= 1
            if not waits.done():
                waits.set_result(None)
        if not self._waiting:
            return
        for other, entered in list(self._held.items()):
            if entered is None:
                continue
            if not self._fits(other):
                return
            self._waiting -= 1
            self._enter(other)
            if not entered.done():
                entered.set_result(None)
