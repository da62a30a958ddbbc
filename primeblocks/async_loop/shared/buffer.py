"""Finished groups on their way from several processes of a machine to the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from ...errors import CapacityError, CorruptionError, UnsupportedError, UsageError
from ..clock import Clock, MonotonicClock
from ..codec import lift, lower
from ..rollout import Group, Rollout
from ..staleness import StalenessPolicy
from .arena import Arena, Head, Word
from .file import SharedFile
from .room import Room, Steps, run, run_async

__all__ = ["SharedRolloutBuffer"]

_FIELDS = [[each.name for each in fields(cls)] for cls in (Group, Rollout)]
_MIN_CELL_BYTES, _MAX_CELLS = 1024, 1 << 14  # More cells make looking for free ones slow.


class SharedRolloutBuffer:
    """Holds finished groups in shared memory, and hands each out once, the oldest first.

    Any process of this machine and user may put groups, and one at a time may take them. A process
    that dies, by SIGKILL too, at any moment, holds nobody up: the group that it was writing is
    never seen and its room comes back, and a batch that it was taking stays for the next to take.
    Waiting producers get room in the order in which they came. The memory stays until `unlink`,
    with the groups in it, whoever dies.

    Producers are held back by room alone, whatever the policy. "wait" waits for groups in flight
    only if `take` is given their versions, and throws away what exceeds the bound otherwise. Let
    `capacity` and the groups that producers have in hand be at most `max_off_policy_steps` batches
    together, and none exceeds the bound by waiting here. An `AsyncLoop` paces and records what it
    starts itself, and takes a `RolloutBuffer`.

    Groups travel without pickle: arrays as they are, everything else as JSON, and a checksum. So
    prompts, prompt ids and attachments may be made of what `codec.pack` takes.

    Calls may come from several threads. In a forked process, attach anew.
    """

    def __init__(self, file: SharedFile, *, clock: Clock | None = None) -> None:
        settings = file.settings()
        if settings.get("fields") != _FIELDS:
            raise UnsupportedError(
                f"{file.path} holds groups of the fields {settings.get('fields')}; here they have "
                f"{_FIELDS}. Run the same version of primeblocks in all processes."
            )
        self.capacity: int = settings["capacity"]
        self.capacity_bytes: int = settings["cells"] * settings["cell_bytes"]
        self.staleness = StalenessPolicy(**settings["staleness"])
        self._clock = MonotonicClock() if clock is None else clock
        sizes = {name: settings[name] for name in ("capacity", "cells", "cell_bytes")}
        self._file, self._room = file, Room(file, Arena(file, **sizes), self._clock)

    @classmethod
    def create(
        cls,
        name: str,
        *,
        capacity: int,
        capacity_bytes: int,
        staleness: StalenessPolicy,
        clock: Clock | None = None,
    ) -> SharedRolloutBuffer:
        """Reserve the memory under a name; what dead processes left under it is replaced.

        Args:
            capacity: groups that fit; a full buffer makes `put` wait.
            capacity_bytes: of all groups with their headers; each takes whole cells, of which
                there are 16,384 at most.
            staleness: the bound that `take` keeps.
            clock: the time of the deadlines.

        Raises:
            UsageError: a process has a buffer of this name open; or a size or the name is none.
            CapacityError: the machine has less shared memory.
            UnsupportedError: it has no /dev/shm.
        """
        if capacity < 1 or capacity_bytes < _MIN_CELL_BYTES:
            raise UsageError(
                f"a buffer holds at least 1 group and {_MIN_CELL_BYTES:,} bytes; got {capacity} "
                f"groups, {capacity_bytes:,} bytes"
            )
        cell_bytes = _MIN_CELL_BYTES
        while capacity_bytes // cell_bytes > _MAX_CELLS:
            cell_bytes *= 2
        sizes = {
            "capacity": capacity,
            "cells": capacity_bytes // cell_bytes,
            "cell_bytes": cell_bytes,
        }
        settings = sizes | {"staleness": asdict(staleness), "fields": _FIELDS}
        size_bytes = Arena.size_bytes(**sizes)
        return cls(SharedFile.create(name, settings, size_bytes=size_bytes), clock=clock)

    @classmethod
    def attach(cls, name: str, *, clock: Clock | None = None) -> SharedRolloutBuffer:
        """Open a buffer that was created.

        Raises:
            UsageError: there is none of this name, or this process has it open already.
            CorruptionError: it was damaged, or laid out by another version of primeblocks.
            UnsupportedError: groups have other fields in the version that created it.
        """
        file = SharedFile.attach(name)
        try:
            return cls(file, clock=clock)
        except BaseException:
            file.close()
            raise

    def __len__(self) -> int:
        """Groups that may be taken."""
        return len(self._room.arena)

    @property
    def held_bytes(self) -> int:
        """Bytes that are not free."""
        arena = self._room.arena
        return arena.used_cells * arena.cell_bytes

    def put(self, group: Group, *, timeout_s: float) -> None:
        """Add a group; wait until there is room for it.

        Raises:
            DeadlineError: it stayed full; the group was not added.
            CapacityError: the group alone is larger than the buffer.
            UnsupportedError: it holds something that cannot be written without pickle.
            ClosedError: the buffer was unlinked.
        """
        run(self._put(group, timeout_s))

    async def put_async(self, group: Group, *, timeout_s: float) -> None:
        """Do as `put`; a cancelled one has not added the group."""
        await run_async(self._put(group, timeout_s), self._clock)

    def take(
        self,
        count: int,
        *,
        version: int,
        timeout_s: float,
        in_flight: Callable[[], Iterable[int]] = tuple,
        on_drop: Callable[[int], None] | None = None,
    ) -> tuple[Group, ...]:
        """Remove `count` groups that the policy `version` may train on, oldest first.

        They leave the buffer together, as the last thing that it does: where the process dies
        before, all are there still. Under "drop", stale groups are removed as well.

        Args:
            in_flight: the versions of groups that are still being generated, which "wait" needs.
            on_drop: called with the ordinal of each group that is thrown away, before it is: it
                may hear of one again where a process died in between.

        Raises:
            DeadlineError: there were not enough in time; only stale groups were removed.
            CapacityError: there never will be: what is there leaves no room for more.
            CorruptionError: a group is not what was put. It is removed, and no other.
            UsageError: more groups are asked for than can be held.
            ClosedError: the buffer was unlinked.
        """
        return run(self._take(count, version, timeout_s, in_flight, on_drop))

    async def take_async(
        self,
        count: int,
        *,
        version: int,
        timeout_s: float,
        in_flight: Callable[[], Iterable[int]] = tuple,
        on_drop: Callable[[int], None] | None = None,
    ) -> tuple[Group, ...]:
        """Do as `take`; a cancelled one has taken nothing."""
        steps = self._take(count, version, timeout_s, in_flight, on_drop)
        return await run_async(steps, self._clock)

    def unlink(self) -> None:
        """Remove the name. The memory is free once all have closed; their waits end at once.

        Raises:
            DeadlineError: a process that is stopped has the table locked.
        """
        run(self._room.shut())

    def close(self) -> None:
        """Let go of it in this process. Groups stay for others.

        Raises:
            UsageError: a call of another thread or task is running.
        """
        if not self._file.inherited and self._room.arena.busy:
            raise UsageError("a put or take is running. Wait for it, or cancel it, before close().")
        self._file.close()

    def __enter__(self) -> SharedRolloutBuffer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, group: Group, timeout_s: float) -> Steps[None]:
        parts = _to_parts(group)
        size, deadline = sum(map(len, parts)), self._clock.now() + timeout_s
        arena = self._room.arena
        if arena.cells_of(size) > arena.cells:
            raise CapacityError(
                f"a group of {size:,} bytes does not fit a buffer of {self.capacity_bytes:,}. "
                "Raise capacity_bytes."
            )
        index = yield from self._room.enter(size, deadline)
        try:
            ages = {"oldest_version": group.oldest_version, "ordinal": group.ordinal}
            arena.write(index, parts, **ages)
            yield from self._room.publish(index, deadline)
        except BaseException:
            arena.leave(index)
            raise

    def _take(
        self,
        count: int,
        version: int,
        timeout_s: float,
        in_flight: Callable[[], Iterable[int]],
        on_drop: Callable[[int], None] | None,
    ) -> Steps[tuple[Group, ...]]:
        if not 1 <= count <= self.capacity:
            raise UsageError(f"cannot take {count} groups of a buffer that holds {self.capacity}")
        deadline, room = self._clock.now() + timeout_s, self._room
        yield from room.become_taker(deadline)
        try:
            while True:
                seen = room.arena.head(Head.CHANGES)
                ready, stuck = yield from room.look(deadline)
                if (yield from self._drop(ready, version, deadline, on_drop)):
                    continue
                ages = room.arena.words(ready, Word.OLDEST_VERSION).tolist()
                if self.staleness.ready(ages, in_flight(), count=count, version=version):
                    break
                if stuck:
                    raise self._too_small(len(ready), count)
                yield from room.pause(seen, deadline, f"a batch of {count} groups")
            groups = yield from self._read(ready[:count], deadline)
            found = [self.staleness.trainable(group, version=version) for group in groups]
            yield from room.remove(ready[:count], deadline)
        finally:
            room.arena.unlock_taker()
        return tuple(group for group in found if group is not None)

    def _drop(
        self,
        ready: np.ndarray,
        version: int,
        deadline: float,
        on_drop: Callable[[int], None] | None,
    ) -> Steps[bool]:
        """Remove what is stale under "wait" and "drop". Return whether there was any."""
        if self.staleness.on_stale not in ("wait", "drop"):
            return False
        arena = self._room.arena
        lag = version - arena.words(ready, Word.OLDEST_VERSION)
        stale = ready[lag > self.staleness.max_off_policy_steps].tolist()
        for index in stale:
            if on_drop is not None:
                on_drop(arena.word(index, Word.ORDINAL))
            yield from self._room.remove([index], deadline)
        return bool(stale)

    def _read(self, indices: np.ndarray, deadline: float) -> Steps[list[Group]]:
        groups, arena = [], self._room.arena
        for index in indices.tolist():
            try:
                reader = arena.read(index)
            except CorruptionError:
                yield from self._room.remove([index], deadline)
                raise
            header = reader.read(arena.word(index, Word.HEADER_SIZE), bytes)
            groups.append(_to_group(lift(bytes(header), reader.read)))
        return groups

    def _too_small(self, ready: int, count: int) -> CapacityError:
        return CapacityError(
            f"a batch of {count} groups never comes together: {ready} groups of {self.capacity} "
            f"and {self.held_bytes:,} bytes of {self.capacity_bytes:,} leave no room for the one "
            "that waits. Raise capacity and capacity_bytes, or take fewer."
        )


def _to_parts(group: Group) -> list[bytes | memoryview]:
    name = f"the group of ordinal {group.ordinal}"
    if strange := [type(each).__name__ for each in group.rollouts if type(each) is not Rollout]:
        raise UnsupportedError(f"{name} has a {strange[0]}, which would come back as a Rollout")
    header, buffers = lower(
        _values(group) | {"rollouts": [*map(_values, group.rollouts)]}, name=name
    )
    return [header, *buffers]


def _to_group(value: dict[str, Any]) -> Group:
    return Group(**value | {"rollouts": tuple(Rollout(**each) for each in value["rollouts"])})


def _values(item: Group | Rollout) -> dict[str, Any]:
    return {each.name: getattr(item, each.name) for each in fields(item)}
