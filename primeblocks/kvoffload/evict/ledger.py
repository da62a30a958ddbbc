"""The ledger of a tier: recency, use, versions and rollouts of its pages."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable

from ...errors import UsageError
from ..page import PageKey
from .arc import Ghosts
from .evict import Candidate, Evict, Live, Snapshot, lru
from .reuse import BACK, Reuse
from .rollouts import Phases

__all__ = ["Ledger"]

logger = logging.getLogger(__name__)

_Pages = OrderedDict[PageKey, Candidate]


class Ledger:
    """The facts behind a `Snapshot`, kept as pages come, are used and go.

    A use costs O(1); a choice O(versions + kinds of waits), with at most 33 kinds; the end of a
    rollout O(its pages). Beyond the tier's pages it remembers the keys of five times as many that
    left, at least `remembers`.

    Args:
        remembers: least number of keys of pages that left, and of rollouts without pages, kept
            however small the tier.
    """

    def __init__(
        self, keys: Iterable[PageKey] = (), *, capacity_pages: int, remembers: int = 256
    ) -> None:
        self._pages: dict[PageKey, Candidate] = {}
        self._once: _Pages = OrderedDict()
        self._often: _Pages = OrderedDict()
        self._by_version: dict[int, _Pages] = {}
        # Each page is in one of these, or is its only rollout's own.
        self._ended: _Pages = OrderedDict()
        self._several: _Pages = OrderedDict()
        self._unnamed: _Pages = OrderedDict()
        self._shelves: dict[PageKey, tuple[_Pages, Hashable]] = {}
        self._rollouts = Phases(remember=max(remembers, capacity_pages))
        self._reuse = Reuse()
        self._left: OrderedDict[PageKey, tuple[str, int]] = OrderedDict()
        self._memory = max(remembers, 4 * capacity_pages)
        self._ghosts = Ghosts(capacity_pages=capacity_pages)
        self._tick = 0
        for key in keys:
            self.touch(key)

    def __len__(self) -> int:
        return len(self._pages)

    def arrive(self, key: PageKey) -> None:
        """Announce a page that will be there; call before its victims are chosen."""
        self._ghosts.arrive(key, once_pages=len(self._once), often_pages=len(self._often))

    def touch(
        self,
        key: PageKey,
        *,
        rollouts: Iterable[Hashable] = (),
        by: Iterable[Hashable] | None = None,
        front: bool = False,
    ) -> None:
        """Note that the page is there and was just used, by these rollouts.

        Args:
            by: those of them that used it now; None if all did.
            front: the page was not used but demoted, after the pages behind it.
        """
        users = tuple(rollouts)
        self._tick += 1
        page, before, sort, last_used = self._seen(key)
        if last_used is not None and sort != _OWN and not front:
            self._reuse.add(sort, self._tick - last_used, then=BACK)
        for name in users:
            page.rollouts = page.rollouts or set()
            page.rollouts.add(name)
            self._rollouts.join(name, page, tick=self._tick)
        self._file(page)
        self._shelve(page, front=front)
        for name in () if front else users if by is None else by:
            again = last_used is not None if before is None else name in before
            alone = last_used if sort == _OWN and again else None
            self._rollouts.turn(name, tick=self._tick, again=again, alone=alone)

    def wait(self, rollout: Hashable, what: Hashable) -> None:
        """Note that a rollout stopped writing: it waits for `what` until it uses its pages again.

        Args:
            what: one of a few names, of tools or of the engine's queue; those beyond 32 count as
                one.
        """
        self._rollouts.wait(rollout, what, tick=self._tick)

    def rollouts(self, key: PageKey) -> tuple[Hashable, ...]:
        """Return the rollouts that use the page and have not ended."""
        return tuple(self._pages[key].rollouts or ())

    def end(self, rollout: Hashable) -> None:
        """End a rollout, which asks for no more pages; unknown ones are ignored."""
        for page in self._rollouts.end(rollout, tick=self._tick):
            assert page.rollouts is not None
            page.rollouts.discard(rollout)
            # A page that is one rollout's now was part of its prompt.
            self._shelve(page, front=True)

    def remove(self, key: PageKey) -> None:
        """Remove a page that is gone; unknown keys are ignored."""
        page = self._pages.pop(key, None)
        if page is None:
            return
        self._once.pop(key, None)
        self._often.pop(key, None)
        if key.version is not None:
            del self._by_version[key.version][key]
            if not self._by_version[key.version]:
                del self._by_version[key.version]
        self._unshelve(page)
        for name in page.rollouts or ():
            self._rollouts.leave(name, page)

    def evicted(self, key: PageKey) -> None:
        """Note that the page left for want of room and may come back."""
        page = self._pages[key]
        self._ghosts.leave(key, often=page.uses > 1, once_pages=len(self._once))
        if (sort := _sort(page)) != _ENDED:
            self._left[key] = sort, page.last_used
            if len(self._left) > self._memory:
                _, (sort, last_used) = self._left.popitem(last=False)
                if sort != _OWN:
                    self._reuse.add(sort, self._tick - last_used, then=None)
        self.remove(key)

    def victim(self, evict: Evict, *, version: int) -> tuple[PageKey, bool]:
        """Return the page that `evict` chooses, and whether to demote it."""
        snapshot = self.snapshot(version=version)
        try:
            choice = evict(snapshot)
            if self._pages.get(choice.page.key) is not choice.page:
                raise UsageError(f"{choice} is none of the pages of the snapshot")
        except Exception:  # a caller's code must not end the store's threads
            logger.exception("%r failed; the least recently used page leaves", evict)
            choice = lru(snapshot)
        return choice.page.key, choice.demote

    def snapshot(self, *, version: int) -> Snapshot:
        """Return the facts as of now."""
        live = self._rollouts.live(tick=self._tick)
        for sort, pages in ((_SEVERAL, self._several), (_UNNAMED, self._unnamed)):
            if (page := _first(pages)) is not None:
                worth = self._reuse.worth(sort, self._tick - page.last_used)
                live.append(Live(page, worth, page.last_used))
        return Snapshot(
            version=version,
            once=_first(self._once),
            often=_first(self._often),
            once_pages=len(self._once),
            once_target=self._ghosts.target,
            from_often=self._ghosts.from_often,
            by_version=[pages[next(iter(pages))] for pages in self._by_version.values()],
            ended=_first(self._ended),
            live=live,
        )

    def _seen(self, key: PageKey) -> tuple[Candidate, frozenset[Hashable] | None, str, int | None]:
        """Return the page, its users, its former sort and the tick of its last use before now.

        For a page that had left, the users are None; for a new one, the last use as well.
        """
        page = self._pages.get(key)
        if page is not None:
            before = frozenset(page.rollouts or ())
            seen = page, before, _sort(page), page.last_used
            page.last_used = self._tick
            page.uses += 1
            return seen
        sort, last_used = self._left.pop(key, (_UNNAMED, None))
        page = self._pages[key] = Candidate(key, self._tick)
        if self._ghosts.forget(key):
            page.uses = 2
        return page, None, sort, last_used

    def _file(self, page: Candidate) -> None:
        """Put the page last among those used as often, and in its version."""
        if page.uses == 1:
            self._once[page.key] = page
        else:
            self._once.pop(page.key, None)
            self._often[page.key] = page
            self._often.move_to_end(page.key)
        if page.key.version is not None:
            pages = self._by_version.setdefault(page.key.version, OrderedDict())
            pages[page.key] = page
            pages.move_to_end(page.key)

    def _shelve(self, page: Candidate, *, front: bool) -> None:
        """Put the page last in its sort; pages of one rollout stay in order of arrival."""
        sort, owner = _sort(page), None
        if sort == _OWN:
            owner = next(iter(page.rollouts or ()))
            shelf = self._rollouts.own(owner)
        else:
            shelf = {_ENDED: self._ended, _SEVERAL: self._several, _UNNAMED: self._unnamed}[sort]
        if self._shelves.get(page.key, (None, None))[0] is not shelf:
            self._unshelve(page)
            shelf[page.key] = page
            self._shelves[page.key] = shelf, owner
        if sort != _OWN or front:
            shelf.move_to_end(page.key, last=sort != _OWN)
        if sort == _OWN:
            self._rollouts.settle(owner)

    def _unshelve(self, page: Candidate) -> None:
        shelf, owner = self._shelves.pop(page.key, (None, None))
        if shelf is not None:
            del shelf[page.key]
            self._rollouts.settle(owner)


_ENDED, _OWN, _SEVERAL, _UNNAMED = "ended", "own", "several", "unnamed"


def _sort(page: Candidate) -> str:
    if page.rollouts is None:
        return _UNNAMED
    return (_ENDED, _OWN, _SEVERAL)[min(len(page.rollouts), 2)]


def _first(pages: _Pages) -> Candidate | None:
    return pages[next(iter(pages))] if pages else None
