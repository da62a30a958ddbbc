"""Phases of the rollouts of a tier: writing, or waiting for something."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from ..page import PageKey
from .evict import Candidate, Live
from .reuse import BACK, Reuse

__all__ = ["Phases"]

_WRITES, _WAITS = "writes", "waits"
_KINDS = 32

Pages = OrderedDict[PageKey, Candidate]
_Phase = tuple[str, Hashable]
_WRITING: _Phase = (_WRITES, None)


@dataclass(slots=True, eq=False)
class _Rollout:
    since: int
    phase: _Phase = _WRITING
    pages: dict[PageKey, Candidate] = field(default_factory=dict)
    own: Pages = field(default_factory=OrderedDict)


class Phases:
    """Rollouts by phase, in the order in which the phases began, and the lengths of phases.

    Args:
        remember: number of rollouts without pages whose phase is kept.
    """

    def __init__(self, *, remember: int) -> None:
        self._reuse = Reuse()
        self._all: dict[Hashable, _Rollout] = {}
        self._lanes: dict[_Phase, OrderedDict[Hashable, _Rollout]] = {}
        self._bare: OrderedDict[Hashable, None] = OrderedDict()
        self._remember = remember
        self._kinds: set[Hashable] = set()

    def own(self, name: Hashable) -> Pages:
        """Return the pages that it alone uses, first page first. Call `settle` after a change."""
        return self._all[name].own

    def settle(self, name: Hashable) -> None:
        """Take account of own pages that came or went; a rollout that has ended has none."""
        rollout = self._all.get(name)
        if rollout is None:
            return
        lane = self._lanes.setdefault(rollout.phase, OrderedDict())
        if rollout.own:
            lane.setdefault(name, rollout)
        else:
            lane.pop(name, None)
            if not lane:
                del self._lanes[rollout.phase]

    def join(self, name: Hashable, page: Candidate, *, tick: int) -> None:
        """Note that the rollout uses the page."""
        self._found(name, tick).pages[page.key] = page
        self._bare.pop(name, None)

    def leave(self, name: Hashable, page: Candidate) -> None:
        """Note that a page of the rollout is gone."""
        rollout = self._all[name]
        del rollout.pages[page.key]
        if not rollout.pages:
            self._keep_bare(name)

    def turn(self, name: Hashable, *, tick: int, again: bool, alone: int | None) -> None:
        """Note that the rollout used a page, which begins a turn if it had done so in the last one.

        Args:
            again: the rollout had used the page before.
            alone: tick of that use, if no other rollout uses the page.
        """
        rollout = self._all[name]
        writes = rollout.phase == _WRITING
        if (alone is not None and alone >= rollout.since) if writes else again:
            self._begin(name, rollout, _WRITING, tick=tick, then=BACK)

    def wait(self, name: Hashable, what: Hashable, *, tick: int) -> None:
        """Note that the rollout waits for `what`."""
        if what not in self._kinds and len(self._kinds) >= _KINDS:
            what = None
        self._kinds.add(what)
        phase = (_WAITS, what)
        rollout = self._found(name, tick)
        if not rollout.pages:
            self._keep_bare(name)
        self._begin(name, rollout, phase, tick=tick, then=phase)

    def end(self, name: Hashable, *, tick: int) -> list[Candidate]:
        """End the rollout and return the pages that it used. Its own pages are to be moved."""
        rollout = self._all.pop(name, None)
        if rollout is None:
            return []
        self._bare.pop(name, None)
        self._leave_lane(name, rollout)
        self._reuse.add(rollout.phase, tick - rollout.since, then=None)
        return list(rollout.pages.values())

    def live(self, *, tick: int) -> list[Live]:
        """Return for each phase the last own pages of the rollouts that began it first and last."""
        found = []
        for phase, lane in self._lanes.items():
            for name in dict.fromkeys((next(iter(lane)), next(reversed(lane)))):
                rollout = lane[name]
                worth = self._reuse.worth(phase, tick - rollout.since)
                page = rollout.own[next(reversed(rollout.own))]
                found.append(Live(page, worth, rollout.since))
        return found

    def _found(self, name: Hashable, tick: int) -> _Rollout:
        if name not in self._all:
            self._all[name] = _Rollout(tick)
        return self._all[name]

    def _keep_bare(self, name: Hashable) -> None:
        self._bare[name] = None
        self._bare.move_to_end(name)
        if len(self._bare) > self._remember:
            oldest, _ = self._bare.popitem(last=False)
            del self._all[oldest]

    def _begin(
        self, name: Hashable, rollout: _Rollout, phase: _Phase, *, tick: int, then: Hashable
    ) -> None:
        self._leave_lane(name, rollout)
        self._reuse.add(rollout.phase, tick - rollout.since, then=then)
        rollout.phase, rollout.since = phase, tick
        self.settle(name)

    def _leave_lane(self, name: Hashable, rollout: _Rollout) -> None:
        lane = self._lanes.get(rollout.phase)
        if lane is not None and lane.pop(name, None) is not None and not lane:
            del self._lanes[rollout.phase]
