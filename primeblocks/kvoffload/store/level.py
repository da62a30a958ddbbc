"""What the store knows about one tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from ...errors import CapacityError, CorruptionError
from ..eviction.evict import Evict
from ..eviction.ledger import Ledger
from ..page import PageKey
from ..tier import TierStatistics
from .moves import Copy

__all__ = ["Level", "statistics_of"]

_TRY_AGAIN = 64  # pages after which a full tier is tried with one more
_COUNTS = ("hits", "misses", "stores", "evictions", "checksum_failures", "failures")


class Level:
    """A lower tier: its copies, its ledger, its counts. A shared tier has counts alone.

    Args:
        keys: what the tier holds already, oldest first.
    """

    def __init__(
        self, name: str, keys: Iterable[PageKey], *, capacity_pages: int, shared: bool
    ) -> None:
        self.name = name
        self.shared = shared
        self.capacity_pages = 0 if shared else capacity_pages
        self.copies = {key: Copy(here=True) for key in keys}
        self.ledger = Ledger(self.copies, capacity_pages=max(1, self.capacity_pages))
        self.counts: Counter[str] = Counter()
        self._coming: set[PageKey] = set()  # not in the ledger yet
        self._room = self.capacity_pages  # less while the tier is fuller than its quota says

    def found(self, key: PageKey) -> Copy | None:
        """The copy that a read would find. A shared tier has to be asked instead."""
        copy = self.copies.get(key)
        return copy if copy is not None and copy.here else None

    def admit(
        self, key: PageKey, evict: Evict, *, version: int
    ) -> tuple[Copy | None, list[PageKey]]:
        """Make room for a page: its copy, None if there is no room, and who leaves for it."""
        if self.shared:
            return Copy(here=False), []
        self.ledger.arrive(key)
        victims: list[PageKey] = []
        while len(self.copies) >= self._room and len(self.copies) > len(self._coming):
            victim, _ = self.ledger.victim(evict, version=version)
            self.ledger.evicted(victim)
            del self.copies[victim]
            self.counts["evictions"] += 1
            victims.append(victim)
        if len(self.copies) >= self._room:
            self.counts["failures"] += 1
            return None, victims
        copy = self.copies[key] = Copy(here=False)
        self._coming.add(key)
        return copy, victims

    def written(self, key: PageKey, copy: Copy, *, length: int, users: Iterable[Hashable]) -> None:
        """The page is there, unless it was dropped since."""
        self.counts["stores"] += 1
        self.counts["bytes_written"] += length
        if self.counts["stores"] % _TRY_AGAIN == 0:
            self._room = min(self._room + 1, self.capacity_pages)
        if self.copies.get(key) is copy:
            copy.here = True
            self._coming.discard(key)
            # It comes before the pages behind it, which left host memory earlier.
            self.ledger.touch(key, rollouts=users, front=True)

    def failed(self, key: PageKey, copy: Copy, error: Exception | None) -> bool:
        """The page is not there, or not as it was; returns whether to drop what is."""
        damaged = isinstance(error, CorruptionError)
        if damaged:
            self.counts["checksum_failures"] += 1
        elif error is not None:
            self.counts["failures"] += 1
        if self.shared:
            return damaged
        dropped = self.copies.get(key) is copy and self.forget(key)
        if isinstance(error, CapacityError):
            self._room = max(1, len(self.copies))
        return dropped

    def forget(self, key: PageKey) -> bool:
        """The page is to be dropped; returns whether there is one."""
        self.ledger.remove(key)
        self._coming.discard(key)
        return self.copies.pop(key, None) is not None

    def clear(self) -> None:
        for key in list(self.copies):
            self.forget(key)

    def served(self, length: int) -> None:
        """A read found its page."""
        self.counts["hits"] += 1
        self.counts["bytes_read"] += length

    def users(self, key: PageKey) -> tuple[Hashable, ...]:
        """The rollouts that use the page here."""
        return self.ledger.rollouts(key) if self.found(key) else ()

    def statistics(self) -> TierStatistics:
        pages = len(self.copies)
        return statistics_of(self.counts, pages=pages, capacity_pages=self.capacity_pages)


def statistics_of(counts: Counter[str], *, pages: int, capacity_pages: int) -> TierStatistics:
    """Counts in the words of `TierStatistics`."""
    named = {name: counts[name] for name in (*_COUNTS, "bytes_written", "bytes_read")}
    return TierStatistics(**named, pages=pages, capacity_pages=capacity_pages)
