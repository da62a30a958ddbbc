"""The ledger of a tier. It keeps recency, and the facts that the policy declares."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from ...errors import UsageError
from ..page import PageKey
from . import Candidate, Evict, Facts, Snapshot, facts_of, lru
from .schedule import Keys, Schedule

__all__ = ["PageLedger"]

logger = logging.getLogger(__name__)

_REMEMBERS = 256


class PageLedger:
    """Keeps the facts behind a `Snapshot` while pages come, are used and leave.

    A use costs O(1). A choice costs O(versions + reasons to wait). The end of a rollout costs
    O(its pages).

    Args:
        evict: the policy. The ledger keeps recency and the facts that the policy declares.
        keys: the pages that the tier already has, oldest first.
        remembers: for how many rollouts without pages the state is kept.
    """

    def __init__(
        self, evict: Evict, keys: Iterable[PageKey] = (), *, remembers: int = _REMEMBERS
    ) -> None:
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
        self._rollouts = Schedule(remember=remembers)
        self._tick = 0
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
            by: the rollouts that used it now. None if all did.
            front: the page was demoted and not used. The pages behind it came before.
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
        """Note that a rollout runs again."""
        if Facts.STATES in self._facts:
            self._rollouts.run(rollout, tick=self._tick)

    def queue(self, rollouts: Sequence[Hashable]) -> None:
        """Note the engine's whole queue, its head first."""
        if Facts.STATES in self._facts:
            self._rollouts.queue(rollouts, tick=self._tick)

    def rollouts(self, key: PageKey) -> tuple[Hashable, ...]:
        """Return the rollouts that use the page and have not ended."""
        return tuple(self._users.get(key, ()))

    def end(self, rollout: Hashable) -> None:
        """End a rollout, which loads no more pages. Unknown rollouts are ignored."""
        for key in reversed(self._rollouts.end(rollout)):
            self._users[key].discard(rollout)
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
                raise UsageError(f"{choice} is none of the pages of the snapshot")
        except Exception:  # a caller's code must not end the store's threads
            logger.exception("%r failed; the least recently used page leaves", self._evict)
            choice = lru(snapshot)
        return choice.page.key, choice.demote

    def snapshot(self, *, version: int) -> Snapshot:
        """Return the facts as of now."""
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
        """Put the page last in its version."""
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
