"""The facts about the pages of a tier: recency, and the facts that the policy declares.

`PageLedger` has the pages. Its `Schedule` has the rollouts that run, wait or queue, and `Waits` the
running means of their waits. Times are in ticks. A tick is one save or load of the tier.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from ...errors import UsageError
from ..page import PageKey
from . import Candidate, Evict, Facts, Live, Snapshot, facts_of, lru

__all__ = ["PageLedger", "Schedule", "Waits"]

logger = logging.getLogger(__name__)

Keys = OrderedDict[PageKey, None]  # of pages, in an order
_State = tuple[str, Hashable]
_RUNS: _State = ("runs", None)
_QUEUES: _State = ("queues", None)

_REMEMBERS = 256  # rollouts without pages, of which the state is kept
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
    """

    def __init__(self) -> None:
        self._waits = Waits()
        self._all: dict[Hashable, _Rollout] = {}
        self._lanes: dict[_State, OrderedDict[Hashable, _Rollout]] = {}
        self._bare: OrderedDict[Hashable, None] = OrderedDict()
        self._queue: dict[Hashable, int] = {}
        self._tail: list[Hashable] = []  # of the queue; those at its end that have no pages are cut
        self._served = 0  # tick of the last service, or of the first in an empty queue

    def own(self, name: Hashable) -> Keys:
        """Return this rollout's own pages, first page first. Call `settle` after a change."""
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
        self._found(name, tick).pages[key] = None
        self._bare.pop(name, None)

    def leave(self, name: Hashable, key: PageKey) -> None:
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
        """Note the engine's queue. Rollouts that left the queue and do not wait are running."""
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
        """End the rollout and return the pages that it used. The caller moves its own pages."""
        rollout = self._all.pop(name, None)
        self._queue.pop(name, None)
        if rollout is None:
            return []
        self._bare.pop(name, None)
        self._leave_lane(name, rollout)
        return list(rollout.pages)

    def live(self, candidate: Callable[[PageKey], Candidate], *, tick: int) -> list[Live]:
        """Return the first rollout of each state, and the last of the queue."""
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
        if len(self._bare) > _REMEMBERS:
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
    """Means of the waits for each reason, and of the time between two services of the queue."""

    def __init__(self) -> None:
        self._any, self._service = _Mean(), _Mean()
        self._by_reason: dict[Hashable, _Mean] = {}

    def add(self, reason: Hashable, ticks: float) -> None:
        self._any.add(ticks)
        if reason in self._by_reason or len(self._by_reason) < _REASONS:
            self._by_reason.setdefault(reason, _Mean()).add(ticks)

    def add_service(self, ticks: float) -> None:
        self._service.add(ticks)

    def service(self, position: int) -> float:
        """Return the ticks until the given number of rollouts has been served."""
        return position * self._service.value

    def expected(self, reason: Hashable, *, age: int, queue: int, runs: bool = False) -> float:
        """Return the ticks of a wait, and of the queue behind it.

        A rollout that has waited for much longer is expected to wait as long again. Before any wait
        was measured, this holds for each rollout. The order is then that of least recent use.
        """
        mean = self._any if runs else self._by_reason.get(reason, self._any)
        ticks = mean.value * (_LATER if runs else 1) + self.service(queue)
        return float(age) if mean.count == 0 or age > _LOST * ticks else ticks


class PageLedger:
    """Keeps the facts behind a `Snapshot` while pages come, are used and leave.

    A use costs O(1). A choice costs O(versions + reasons to wait). The end of a rollout costs
    O(its pages). `keys` are the pages that the tier already has, oldest first.
    """

    def __init__(self, evict: Evict, keys: Iterable[PageKey] = ()) -> None:
        self._evict = evict
        self._facts = facts_of(evict)
        # Asking a flag costs as much as the rest of a use.
        self._versions, self._ends = Facts.VERSIONS in self._facts, Facts.ENDS in self._facts
        # No object for a page: the collector of cycles would look at each again and again.
        self._pages: OrderedDict[PageKey, int] = OrderedDict()  # and the tick of its last use
        self._users: dict[PageKey, set[Hashable]] = {}  # of pages for which a rollout was named
        self._by_version: dict[int, Keys] = {}
        # With STATES each page is in one of these, or is its only rollout's own.
        self._ended: Keys = OrderedDict()
        self._shared: Keys = OrderedDict()
        self._unnamed: Keys = OrderedDict()
        self._shelves: dict[PageKey, tuple[Keys, Hashable]] = {}
        self._rollouts = Schedule()
        self._tick = 0
        self._failed = False  # the policy
        for key in keys:
            self.touch(key)

    def __len__(self) -> int:
        return len(self._pages)

    def touch(
        self,
        key: PageKey,
        *,
        rollouts: Iterable[Hashable] = (),
        by: Iterable[Hashable] | None = None,
        front: bool = False,
    ) -> None:
        """Note that the tier has the page, and that these rollouts just used it.

        Args:
            by: those of `rollouts` that used the page now. With None, all did.
            front: the page was demoted and not used. The later pages of its rollouts came before
                it.
        """
        self._tick += 1
        self._pages[key] = self._tick
        self._pages.move_to_end(key)
        self._file(key)
        if self._ends:
            self._use(key, tuple(rollouts), by, front=front)

    def pause(self, rollout: Hashable, reason: Hashable) -> None:
        """Note that a rollout waits for `reason` until it uses its pages again or queues."""
        if Facts.STATES in self._facts:
            self._rollouts.pause(rollout, reason, tick=self._tick)

    def resume(self, rollout: Hashable) -> None:
        if Facts.STATES in self._facts:
            self._rollouts.run(rollout, tick=self._tick)

    def queue(self, rollouts: Sequence[Hashable]) -> None:
        if Facts.STATES in self._facts:
            self._rollouts.queue(rollouts, tick=self._tick)

    def rollouts(self, key: PageKey) -> tuple[Hashable, ...]:
        """Return the rollouts that use the page and have not ended."""
        return tuple(self._users.get(key, ()))

    def end(self, rollout: Hashable) -> None:
        """End a rollout, which loads no more pages. Unknown rollouts are ignored."""
        for key in reversed(self._rollouts.end(rollout)):
            users = self._users[key]
            users.discard(rollout)
            if len(users) < 2:
                # A page that is one rollout's now was part of its prompt.
                self._shelve(key, front=True)

    def remove(self, key: PageKey) -> None:
        """Remove a page that left the tier. Unknown keys are ignored."""
        if self._pages.pop(key, None) is None:
            return
        if self._by_version and (version := key.version) in self._by_version:
            del self._by_version[version][key]
            if not self._by_version[version]:
                del self._by_version[version]
        if self._ends:
            self._unshelve(key)
            for name in self._users.pop(key, ()):
                self._rollouts.leave(name, key)

    def victim(self, *, version: int) -> tuple[PageKey, bool]:
        """Return the page that the policy chooses, and whether to demote it."""
        if self._evict is lru:  # without a snapshot, which costs as much as the rest of an eviction
            return next(iter(self._pages)), True
        snapshot = self.snapshot(version=version)
        try:
            choice = self._evict(snapshot)
            if self._pages.get(choice.page.key) != choice.page.last_used:
                raise UsageError(f"{choice} is not one of the pages of the snapshot")
        except Exception:  # a caller's code must not end the store's threads
            if not self._failed:
                self._failed = True
                logger.exception(
                    "%r failed, so LRU chooses. Later failures are not logged.", self._evict
                )
            choice = lru(snapshot)
        return choice.page.key, choice.demote

    def snapshot(self, *, version: int) -> Snapshot:
        oldest = self._first(self._pages)
        assert oldest is not None
        return Snapshot(
            version=version,
            tick=self._tick,
            oldest=oldest,
            by_version=[self._candidate(next(iter(keys))) for keys in self._by_version.values()],
            ended=self._first(self._ended),
            live=self._rollouts.live(self._candidate, tick=self._tick),
            shared=self._first(self._shared),
            unnamed=self._first(self._unnamed),
        )

    def _first(self, keys: Iterable[PageKey]) -> Candidate | None:
        return next((self._candidate(key) for key in keys), None)

    def _candidate(self, key: PageKey) -> Candidate:
        return Candidate(key, self._pages[key], self._users.get(key))

    def _file(self, key: PageKey) -> None:
        if self._versions and (version := key.version) is not None:
            keys = self._by_version.setdefault(version, OrderedDict())
            keys[key] = None
            keys.move_to_end(key)

    def _use(
        self,
        key: PageKey,
        users: tuple[Hashable, ...],
        by: Iterable[Hashable] | None,
        *,
        front: bool,
    ) -> None:
        for name in users:
            self._users.setdefault(key, set()).add(name)
            self._rollouts.join(name, key, tick=self._tick)
        self._shelve(key, front=front)
        if Facts.STATES in self._facts and not front:
            for name in users if by is None else by:
                self._rollouts.run(name, tick=self._tick)

    def _shelve(self, key: PageKey, *, front: bool) -> None:
        """Put the page last among its kind. Pages of one rollout stay in order of arrival."""
        users, owner = self._users.get(key), None
        if users is None:
            shelf = self._unnamed
        elif len(users) == 1:
            (owner,) = users
            shelf = self._rollouts.own(owner)
        else:
            shelf = self._shared if users else self._ended
        if self._shelves.get(key, (None, None))[0] is not shelf:
            self._unshelve(key)
            shelf[key] = None
            self._shelves[key] = shelf, owner
        if owner is None or front:
            shelf.move_to_end(key, last=owner is None)
        if owner is not None:
            self._rollouts.settle(owner)

    def _unshelve(self, key: PageKey) -> None:
        shelf, owner = self._shelves.pop(key, (None, None))
        if shelf is not None:
            del shelf[key]
            if owner is not None:
                self._rollouts.settle(owner)
