"""What a tier knows of its pages: recency, use, versions, rollouts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from .arc import Ghosts
from .evict import Candidate, Choice, Evict, Snapshot
from .page import PageKey
from .reuse import Gaps

__all__ = ["Ledger"]

_UNNAMED, _ENDED, _ONE, _SEVERAL = range(4)
_Pages = OrderedDict[PageKey, Candidate]


class Ledger:
    """The facts behind a `Snapshot`, kept as pages come, are used and go.

    A use costs O(1); a choice O(lanes), at most four for each version that has pages; the end of a
    rollout O(its pages). Beyond the tier's pages it remembers the names of five times as many
    that left.
    """

    def __init__(self, keys: Iterable[PageKey] = (), *, capacity_pages: int) -> None:
        self._pages: dict[PageKey, Candidate] = {}
        self._once: _Pages = OrderedDict()
        self._often: _Pages = OrderedDict()
        self._lanes: dict[tuple[int | None, int], _Pages] = {}
        self._lane_of: dict[PageKey, tuple[int | None, int]] = {}
        self._chains: dict[Hashable, OrderedDict[PageKey, None]] = {}
        self._ghosts = Ghosts(capacity_pages=capacity_pages)
        self._gaps = Gaps(memory_pages=4 * capacity_pages)
        self._tick = 0
        self._filed = 0
        for key in keys:
            self.touch(key)

    def arrive(self, key: PageKey) -> None:
        """A page that is not there will be; comes before its victims are chosen."""
        self._ghosts.arrive(key, once_pages=len(self._once), often_pages=len(self._often))

    def touch(
        self, key: PageKey, *, rollouts: Iterable[Hashable] = (), front: bool = False
    ) -> None:
        """The page is there and was just used, by these rollouts.

        Args:
            front: it comes before the other pages of its rollouts, as one that was demoted after
                those behind it.
        """
        self._tick += 1
        page = self._pages.get(key)
        if page is None:
            last_used = self._gaps.back(key)
            page = self._pages[key] = Candidate(key, self._tick)
            if self._ghosts.forget(key):
                page.uses = 2
        else:
            last_used, page.last_used = page.last_used, self._tick
            page.uses += 1
        for rollout in rollouts:
            if page.rollouts is None:
                page.rollouts = set()
            page.rollouts.add(rollout)
            chain = self._chains.setdefault(rollout, OrderedDict())
            chain.setdefault(key)
            if front:
                chain.move_to_end(key, last=False)
        self._file(page)
        if last_used is not None and self._lane_of[key][1] == _ONE:
            self._gaps.add(self._tick - last_used)

    def rollouts(self, key: PageKey) -> tuple[Hashable, ...]:
        """Who uses the page and has not ended."""
        return tuple(self._pages[key].rollouts or ())

    def end(self, rollout: Hashable) -> None:
        """A rollout asks for nothing any more; unknown ones are ignored."""
        for key in self._chains.pop(rollout, ()):
            page = self._pages[key]
            assert page.rollouts is not None
            page.rollouts.discard(rollout)
            if not page.rollouts:
                self._enter(page, _ENDED)

    def remove(self, key: PageKey) -> None:
        """The page is gone; unknown keys are ignored."""
        page = self._pages.pop(key, None)
        if page is None:
            return
        self._once.pop(key, None)
        self._often.pop(key, None)
        self._leave_lane(key)
        for rollout in page.rollouts or ():
            chain = self._chains[rollout]
            del chain[key]
            if not chain:
                del self._chains[rollout]

    def evicted(self, key: PageKey) -> None:
        """The page left for want of room and may come back."""
        page = self._pages[key]
        self._ghosts.leave(key, often=page.uses > 1, once_pages=len(self._once))
        if page.rollouts:
            self._gaps.leave(key, page.last_used)
        self.remove(key)

    def victim(self, evict: Evict, *, version: int) -> tuple[PageKey, bool]:
        """The page that `evict` chooses, and whether to demote it."""
        choice = evict(self.snapshot(version=version))
        return (self._tail(choice) if choice.tail else choice.page.key), choice.demote

    def snapshot(self, *, version: int) -> Snapshot:
        """The facts as of now."""
        lanes = self._lanes
        return Snapshot(
            version=version,
            tick=self._tick,
            once=_first(self._once),
            often=_first(self._often),
            once_pages=len(self._once),
            once_target=self._ghosts.target,
            from_often=self._ghosts.from_often,
            oldest=[lane[next(iter(lane))] for lane in lanes.values()],
            newest=[lane[next(reversed(lane))] for (_, who), lane in lanes.items() if who == _ONE],
            patience=self._gaps.patience(),
        )

    def _file(self, page: Candidate) -> None:
        """Last in its list and in its lane. A lane changes here, at a use, or when all have ended:
        so that lanes are in the order of use."""
        if page.uses == 1:
            self._once[page.key] = page
        else:
            self._once.pop(page.key, None)
            self._often[page.key] = page
            self._often.move_to_end(page.key)
        if page.rollouts is None:
            self._enter(page, _UNNAMED)
        else:
            self._enter(page, (_ENDED, _ONE, _SEVERAL)[min(len(page.rollouts), 2)])

    def _enter(self, page: Candidate, who: int) -> None:
        self._filed += 1
        page.filed = self._filed
        lane = (page.key.version, who)
        if self._lane_of.get(page.key) == lane:
            self._lanes[lane].move_to_end(page.key)
        else:
            self._leave_lane(page.key)
            self._lane_of[page.key] = lane
            self._lanes.setdefault(lane, OrderedDict())[page.key] = page

    def _leave_lane(self, key: PageKey) -> None:
        lane = self._lane_of.pop(key, None)
        if lane is not None:
            del self._lanes[lane][key]
            if not self._lanes[lane]:
                del self._lanes[lane]

    def _tail(self, choice: Choice) -> PageKey:
        page = choice.page
        if page.rollouts is None or len(page.rollouts) != 1:
            return page.key
        (rollout,) = page.rollouts
        last = self._pages[next(reversed(self._chains[rollout]))]
        return last.key if last.rollouts == page.rollouts else page.key


def _first(pages: _Pages) -> Candidate | None:
    return pages[next(iter(pages))] if pages else None
