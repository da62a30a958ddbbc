"""Bounds for any policy: traces played against a tier, and with knowledge of the future."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...errors import PlanError
from ..page import PageKey
from .evict import Evict
from .ledger import Ledger
from .traces import Advance, End, Event, Trace, Use, Wait

__all__ = ["Outcome", "belady", "play"]


@dataclass(frozen=True)
class Outcome:
    """Hits of a tier in a trace.

    Args:
        asked: pages that rollouts asked for and that had been saved before.
        hits: those that were there.
        prefix_hits: those that were there with all pages before them.
    """

    asked: int
    hits: int
    prefix_hits: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


def play(trace: Trace, *, evict: Evict, capacity_pages: int) -> Outcome:
    """Play a trace against a tier of equal pages. Pure.

    For each request, the pages that are there are used, the last page first; then the missing ones
    are computed and saved, the first page first. Only rollouts that the trainer still admits ask:
    the trace ends the others.

    Raises:
        PlanError: not even one page fits.
    """
    return _run(trace, _Ledgered(evict, capacity_pages))


def belady(trace: Trace, *, capacity_pages: int) -> Outcome:
    """Play a trace knowing the future: the page whose next use is farthest leaves. Pure.

    No policy has more hits where pages have one size, every page is saved when it is computed, and
    requests are of one page. An oracle for traces, not for stores. For requests of many pages the
    rule is the same: it counts pages, not prefixes.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966; MIN.

    Raises:
        PlanError: not even one page fits.
    """
    return _run(trace, _Foreseen(trace, capacity_pages))


class _Cache(Protocol):
    def __contains__(self, key: PageKey) -> bool: ...
    def use(self, key: PageKey, rollout: Hashable) -> None: ...
    def note(self, event: Event) -> None: ...


def _run(trace: Trace, cache: _Cache) -> Outcome:
    asked = hits = prefix_hits = 0
    for event in trace.events:
        cache.note(event)
        if not isinstance(event, Use):
            continue
        held = [key in cache for key in event.pages]
        wanted = held[: event.asked]
        asked += len(wanted)
        hits += sum(wanted)
        prefix_hits += (*wanted, False).index(False)
        for key, here in zip(reversed(event.pages), reversed(held), strict=True):
            if here:
                cache.use(key, event.rollout)
        for key, here in zip(event.pages, held, strict=True):
            if not here:
                cache.use(key, event.rollout)
    return Outcome(asked, hits, prefix_hits)


class _Ledgered:
    """A tier of keys without pages, with a store's ledger."""

    def __init__(self, evict: Evict, capacity_pages: int) -> None:
        self._capacity = _checked(capacity_pages)
        self._evict = evict
        self._ledger = Ledger(capacity_pages=capacity_pages)
        self._keys: set[PageKey] = set()
        self._version = 0

    def __contains__(self, key: PageKey) -> bool:
        return key in self._keys

    def note(self, event: Event) -> None:
        if isinstance(event, Advance):
            self._version = event.version
        elif isinstance(event, End):
            self._ledger.end(event.rollout)
        elif isinstance(event, Wait):
            self._ledger.wait(event.rollout, event.what)

    def use(self, key: PageKey, rollout: Hashable) -> None:
        if key not in self._keys:
            self._ledger.arrive(key)
            if len(self._keys) >= self._capacity:
                victim, _ = self._ledger.victim(self._evict, version=self._version)
                self._ledger.evicted(victim)
                self._keys.remove(victim)
            self._keys.add(key)
        self._ledger.touch(key, rollouts=(rollout,))


class _Foreseen:
    """A tier that knows when each page is asked for next."""

    def __init__(self, trace: Trace, capacity_pages: int) -> None:
        self._capacity = _checked(capacity_pages)
        self._next: dict[PageKey, float] = {}
        # Farthest first, the last page of a rollout first; entries of pages used since are skipped.
        self._heap: list[tuple[float, int, int, PageKey]] = []
        self._coming = _coming(trace.events)
        self._later: dict[PageKey, tuple[float, int]] = {}
        self._pushed = 0

    def __contains__(self, key: PageKey) -> bool:
        return key in self._next

    def note(self, event: Event) -> None:
        if isinstance(event, Use):
            later = zip(next(self._coming), range(0, -len(event.pages), -1), strict=True)
            self._later = dict(zip(event.pages, later, strict=True))

    def use(self, key: PageKey, rollout: Hashable) -> None:
        while key not in self._next and len(self._next) >= self._capacity:
            farthest, *_, victim = heapq.heappop(self._heap)
            if self._next.get(victim) == -farthest:
                del self._next[victim]
        self._next[key], place = self._later[key]
        self._pushed += 1
        heapq.heappush(self._heap, (-self._next[key], place, self._pushed, key))


def _coming(events: Sequence[Event]) -> Iterator[list[float]]:
    """Yield for each use when its pages are used next."""
    following: dict[PageKey, float] = {}
    answers = []
    for at in range(len(events) - 1, -1, -1):
        event = events[at]
        if isinstance(event, Use):
            answers.append([following.get(key, float("inf")) for key in event.pages])
            following.update(dict.fromkeys(event.pages, at))
    return reversed(answers)


def _checked(capacity_pages: int) -> int:
    if capacity_pages < 1:
        raise PlanError(f"a tier holds at least one page; got {capacity_pages}")
    return capacity_pages
