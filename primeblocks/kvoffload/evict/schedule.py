"""The rollouts of a tier, running, waiting or queued, and running means of their waits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from ..page import PageKey
from . import Candidate, Live

__all__ = ["Schedule", "Waits"]

Keys = OrderedDict[PageKey, None]  # of pages, in an order
_State = tuple[str, Hashable]
_RUNS: _State = ("runs", None)
_QUEUES: _State = ("queues", None)

_MEMORY = 64  # a mean follows the last of so many
_REASONS = 64  # others count as any wait
_LATER = 1.5  # who runs waits later: half a mean wait, or more, from now
_LOST = 8  # who has waited so many times the mean may not come back


@dataclass(slots=True, eq=False)
class _Rollout:
    since: int
    state: _State = _RUNS
    pages: dict[PageKey, None] = field(default_factory=dict)
    own: Keys = field(default_factory=OrderedDict)


class Schedule:
    """The rollouts by state, in the order in which they entered it, and the means of their waits.

    Running rollouts are in the order of their last use.

    Args:
        remember: for how many rollouts without pages the state is kept.
    """

    def __init__(self, *, remember: int) -> None:
        self._waits = Waits()
        self._all: dict[Hashable, _Rollout] = {}
        self._lanes: dict[_State, OrderedDict[Hashable, _Rollout]] = {}
        self._bare: OrderedDict[Hashable, None] = OrderedDict()
        self._remember = remember
        self._queue: dict[Hashable, int] = {}
        self._tail: list[Hashable] = []  # of the queue; those at its end that have no pages are cut
        self._served = 0  # tick of the last service, or of the first in an empty queue

    def own(self, name: Hashable) -> Keys:
        """Return the pages that only it uses, first page first. Call `settle` after a change."""
        return self._all[name].own

    def settle(self, name: Hashable) -> None:
        """Take account of own pages that came or went. An ended rollout does not have own pages."""
        rollout = self._all.get(name)
        if rollout is None:
            return
        if rollout.state is _QUEUES:
            if rollout.own and name not in self._tail[-1:]:
                self._tail = list(self._queue)
            return
        lane = self._lanes.setdefault(rollout.state, OrderedDict())
        if rollout.own:
            lane.setdefault(name, rollout)
        else:
            lane.pop(name, None)
            if not lane:
                del self._lanes[rollout.state]

    def join(self, name: Hashable, key: PageKey, *, tick: int) -> None:
        """Note that the rollout uses the page."""
        self._found(name, tick).pages[key] = None
        self._bare.pop(name, None)

    def leave(self, name: Hashable, key: PageKey) -> None:
        """Note that a page of the rollout left."""
        rollout = self._all[name]
        del rollout.pages[key]
        if not rollout.pages:
            self._keep_bare(name)

    def run(self, name: Hashable, *, tick: int) -> None:
        """Note that the rollout was active: it runs, unless the queue has it, or it has ended."""
        rollout = self._all.get(name)
        if rollout is None or rollout.state is _QUEUES:
            return
        if rollout.state is _RUNS:
            rollout.since = tick
            if (lane := self._lanes.get(_RUNS)) is not None and name in lane:
                lane.move_to_end(name)
            return
        self._waits.add(rollout.state[1], tick - rollout.since)
        self._move(name, rollout, _RUNS, tick=tick)

    def pause(self, name: Hashable, reason: Hashable, *, tick: int) -> None:
        """Note that the rollout waits for `reason`. A wait that has begun keeps its start."""
        rollout = self._found(name, tick)
        if not rollout.pages:
            self._keep_bare(name)
        self._queue.pop(name, None)
        if rollout.state != ("waits", reason):
            since = rollout.since if rollout.state[0] == "waits" else tick
            self._move(name, rollout, ("waits", reason), tick=since)

    def queue(self, names: Sequence[Hashable], *, tick: int) -> None:
        """Note the engine's queue. Rollouts that left the queue and do not wait now run."""
        before, self._queue = self._queue, {name: place for place, name in enumerate(names)}
        served = [name for name in before if name not in self._queue]
        for name in served:
            self._waits.add_service((tick - self._served) / len(served))
            if name in self._all:
                self._move(name, self._all[name], _RUNS, tick=tick)
        if served or not before:
            self._served = tick
        for name in names:
            rollout = self._all.get(name)
            if rollout is not None and rollout.state is not _QUEUES:
                if rollout.state is not _RUNS:
                    self._waits.add(rollout.state[1], tick - rollout.since)
                self._move(name, rollout, _QUEUES, tick=tick)
        self._tail = list(self._queue)

    def end(self, name: Hashable) -> list[PageKey]:
        """End the rollout and return the pages that it used. Its own pages are to be moved."""
        rollout = self._all.pop(name, None)
        self._queue.pop(name, None)
        if rollout is None:
            return []
        self._bare.pop(name, None)
        self._leave_lane(name, rollout)
        return list(rollout.pages)

    def live(self, candidate: Callable[[PageKey], Candidate], *, tick: int) -> list[Live]:
        """Return the first rollout of each lane, and the last of the queue."""
        names = [next(iter(lane)) for lane in self._lanes.values()]
        while self._tail and not self._queues(self._tail[-1]):
            self._tail.pop()
        return [self._live(name, candidate, tick) for name in (*names, *self._tail[-1:])]

    def _queues(self, name: Hashable) -> bool:
        return name in self._queue and name in self._all and bool(self._all[name].own)

    def _live(self, name: Hashable, candidate: Callable[[PageKey], Candidate], tick: int) -> Live:
        rollout = self._all[name]
        (state, reason), since, waits = rollout.state, rollout.since, self._waits
        position = self._queue[name] if state == "queues" else 0
        if state == "queues":
            expected = waits.service(position + 1)
        else:
            expected = waits.expected(
                reason, age=tick - since, queue=len(self._queue) + 1, runs=state == "runs"
            )
        page = candidate(next(reversed(rollout.own)))
        return Live(page, state, since, position, expected)

    def _found(self, name: Hashable, tick: int) -> _Rollout:
        if name not in self._all:
            state = _QUEUES if name in self._queue else _RUNS
            self._all[name] = _Rollout(tick, state)
        return self._all[name]

    def _keep_bare(self, name: Hashable) -> None:
        self._bare[name] = None
        self._bare.move_to_end(name)
        if len(self._bare) > self._remember:
            oldest, _ = self._bare.popitem(last=False)
            del self._all[oldest]

    def _move(self, name: Hashable, rollout: _Rollout, state: _State, *, tick: int) -> None:
        self._leave_lane(name, rollout)
        rollout.state, rollout.since = state, tick
        self.settle(name)

    def _leave_lane(self, name: Hashable, rollout: _Rollout) -> None:
        lane = self._lanes.get(rollout.state)
        if lane is not None and lane.pop(name, None) is not None and not lane:
            del self._lanes[rollout.state]


class _Mean:
    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.value += (value - self.value) / self.count


class Waits:
    """Means of the waits for each reason, and of the time between two services of the queue.

    Times are in ticks. A tick is one save or load of the tier.
    """

    def __init__(self) -> None:
        self._any, self._service = _Mean(), _Mean()
        self._by_reason: dict[Hashable, _Mean] = {}

    def add(self, reason: Hashable, ticks: float) -> None:
        """Add a wait that is over."""
        self._any.add(ticks)
        if reason in self._by_reason or len(self._by_reason) < _REASONS:
            self._by_reason.setdefault(reason, _Mean()).add(ticks)

    def add_service(self, ticks: float) -> None:
        """Add the time between two services of the queue."""
        self._service.add(ticks)

    def service(self, position: int) -> float:
        """Return the ticks until the given number of rollouts has been served."""
        return position * self._service.value

    def expected(self, reason: Hashable, *, age: int, queue: int, runs: bool = False) -> float:
        """Return the ticks of a wait, and of the queue behind it.

        A rollout that has waited for much longer is expected after as long again. While nothing is
        known, this holds for each rollout: that is the order of least recent use.
        """
        mean = self._any if runs else self._by_reason.get(reason, self._any)
        ticks = mean.value * (_LATER if runs else 1) + self.service(queue)
        return float(age) if mean.count == 0 or age > _LOST * ticks else ticks
