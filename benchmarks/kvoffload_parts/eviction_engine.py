"""A model of an engine's own prefix cache, and of a tier that gets what passes through it.

An engine asks the tier only for what its own cache lost, so a tier behind it is asked for other
pages than one in front. The model: pages of requests that run are held; those of others leave in
the order of least recent use, the last page of a request first, as in vLLM's queue of free blocks.
At its start a request asks the tier for the pages after the first that the engine lacks, and uses
those up to the first that the tier lacks; the others are computed again. Every page that the
engine has then is saved, if the tier lacks it: at the start of a turn, and at its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import Evict
from primeblocks.kvoffload.evict.ledger import PageLedger

from .eviction_traces import Advance, End, Trace, Use, Wait

__all__ = ["Ask", "Behind", "Cache", "Ours", "Outcome", "Queue", "Resume", "Save", "behind", "play"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the tier, for pages saved before that the engine has no more."""

    rollout: Hashable
    pages: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Pages that the engine has now, for the tier to keep those that it lacks."""

    rollout: Hashable
    pages: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """The start of a turn."""

    rollout: Hashable


@dataclass(frozen=True, slots=True)
class Queue:
    """The rollouts that wait for the engine, the next first."""

    rollouts: tuple[Hashable, ...]


Step = Ask | Save | Resume | Queue | Wait | End | Advance


@dataclass(frozen=True)
class Behind:
    """What a tier behind an engine sees of a trace.

    Args:
        asked: pages that the tier is asked for, of those `used` again.
    """

    steps: tuple[Step, ...]
    asked: int
    used: int


@dataclass(frozen=True)
class Outcome:
    """Pages that a tier was asked for, and those that the engine could use."""

    asked: int
    hits: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


def behind(trace: Trace, *, engine_pages: int) -> Behind:
    """Play a trace through an engine that has `engine_pages`, more if those that run need more."""
    engine = _Engine(engine_pages)
    for event in trace.events:
        match event:
            case Use():
                engine.use(event)
            case Wait(rollout, "queue"):
                engine.queue[rollout] = None
                engine.tell_queue()
            case Wait() | End():
                engine.stop(event)
            case Advance():
                engine.steps.append(event)
    return Behind(tuple(engine.steps), engine.asked, engine.used)


class _Engine:
    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free: OrderedDict[PageKey, None] = OrderedDict()
        self.held: Counter[PageKey] = Counter()
        self.running: defaultdict[Hashable, list[PageKey]] = defaultdict(list)
        self.queue: dict[Hashable, None] = {}
        self.steps: list[Step] = []
        self.asked = self.used = 0

    def use(self, event: Use) -> None:
        rollout, pages = event.rollout, event.pages
        if rollout not in self.running:
            if rollout in self.queue:
                del self.queue[rollout]
                self.tell_queue()
            self.steps.append(Resume(rollout))
            here = [page in self.free or page in self.held for page in pages]
            first = [*here, False].index(False)
            self.used += event.asked
            if first < event.asked:
                self.asked += event.asked - first
                self.steps.append(Ask(rollout, pages[first : event.asked]))
        self.hold(rollout, pages)
        self.steps.append(Save(rollout, pages))

    def hold(self, rollout: Hashable, pages: Iterable[PageKey]) -> None:
        has = set(self.running[rollout])
        for page in pages:
            if page not in has:
                self.running[rollout].append(page)
                self.free.pop(page, None)
                self.held[page] += 1
        self.fit()

    def stop(self, event: Wait | End) -> None:
        for page in reversed(self.running.pop(event.rollout, [])):
            self.held[page] -= 1
            if not self.held[page]:
                del self.held[page]
                self.free[page] = None
        self.fit()
        self.steps.append(event)
        if event.rollout in self.queue:
            del self.queue[event.rollout]
            self.tell_queue()

    def fit(self) -> None:
        while self.free and len(self.free) + len(self.held) > self.pages:
            self.free.popitem(last=False)

    def tell_queue(self) -> None:
        self.steps.append(Queue(tuple(self.queue)))


class Cache(Protocol):
    """A tier of keys without pages."""

    def __contains__(self, key: PageKey) -> bool: ...
    def load(self, rollout: Hashable, pages: Sequence[PageKey]) -> None: ...
    def save(self, rollout: Hashable, page: PageKey) -> None: ...
    def note(self, step: Step) -> None: ...


def play(seen: Behind, cache: Cache) -> Outcome:
    """Play what a tier sees. Only pages that it lacks are saved."""
    hits = 0
    for step in seen.steps:
        if isinstance(step, Ask):
            here = [page in cache for page in step.pages]
            found = [*here, False].index(False)
            hits += found
            cache.load(step.rollout, step.pages[:found])
        elif isinstance(step, Save):
            for page in step.pages:
                if page not in cache:
                    cache.save(step.rollout, page)
        cache.note(step)
    return Outcome(seen.asked, hits)


class Ours:
    """The ledger of a store, and a policy.

    Args:
        tells: kinds of steps that the tier is told.
        names: whether it is told the names of rollouts.
    """

    def __init__(
        self,
        evict: Evict,
        capacity_pages: int,
        *,
        tells: tuple[type, ...] = (Wait, Resume, Queue, End),
        names: bool = True,
    ) -> None:
        self._names = names
        self._capacity, self._tells = capacity_pages, tells
        self._ledger = PageLedger(evict)
        self._keys: set[PageKey] = set()
        self._version = 0

    def __contains__(self, key: PageKey) -> bool:
        return key in self._keys

    def load(self, rollout: Hashable, pages: Sequence[PageKey]) -> None:
        for page in reversed(pages):
            self._ledger.touch(page, rollouts=(rollout,) if self._names else ())

    def save(self, rollout: Hashable, page: PageKey) -> None:
        if len(self._keys) >= self._capacity:
            victim, _ = self._ledger.victim(version=self._version)
            self._ledger.remove(victim)
            self._keys.remove(victim)
        self._keys.add(page)
        self._ledger.touch(page, rollouts=(rollout,) if self._names else ())

    def note(self, step: Step) -> None:
        if isinstance(step, Advance):
            self._version = step.version
        if not isinstance(step, self._tells):
            return
        match step:
            case End():
                self._ledger.end(step.rollout)
            case Wait():
                self._ledger.pause(step.rollout, step.what)
            case Queue():
                self._ledger.queue(step.rollouts)
            case Resume():
                self._ledger.resume(step.rollout)
