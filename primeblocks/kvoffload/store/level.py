"""A lower tier as the store knows it: its pages, its counts, its circuit breaker."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from time import monotonic

from ...errors import CapacityError, CorruptionError, PlanError, UnsupportedError
from ..evict import Evict, facts_of
from ..evict.ledger import PageLedger
from ..host import HostTier
from ..page import PageKey
from ..tier import Tier, TierStatistics
from .breaker import Breaker
from .moves import Clear, Drop, HostPage, LowerCopy, Recall, Recalled, Write

__all__ = ["Level", "Levels", "in_order", "levels_of", "statistics_of"]

logger = logging.getLogger(__name__)

_COUNTS = ("hits", "misses", "stores", "evictions", "checksum_failures", "failures", "skipped")


class Level:
    """A lower tier: its copies, its ledger, its counts. A shared tier has counts alone.

    Args:
        keys: pages that the tier holds already, oldest first.
        patience_s: seconds that pages wait for this tier; `Breaker` says for what.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        keys: Iterable[PageKey],
        *,
        capacity_pages: int,
        shared: bool,
        patience_s: float = 1.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.name = name
        self.shared = shared
        self.capacity_pages = 0 if shared else capacity_pages
        self.copies = {key: LowerCopy(here=True) for key in keys}
        self.ledger = PageLedger(self.copies)  # of those that are here
        self.counts: Counter[str] = Counter()
        self.refusal: Exception | None = None  # the last of a write
        self.refusals = 0
        self.breaker = Breaker(patience_s=patience_s, clock=clock)

    def found(self, key: PageKey) -> LowerCopy | None:
        """Return the copy that a read would find. A shared tier has to be asked instead."""
        copy = self.copies.get(key)
        return copy if copy is not None and copy.here else None

    def admit(
        self, key: PageKey, evict: Evict, *, version: int, feed: int | None = 1
    ) -> tuple[LowerCopy | None, list[PageKey]]:
        """Make room for a page; return its copy, or None, and the keys of pages that leave for it.

        Args:
            feed: writes at once to a tier that does not keep up. None is a flush: it skips no page
                but those for which others would leave a tier that has to prove itself.
        """
        if self.breaker.skips(feed=feed):
            self.counts["skipped"] += 1
            return None, []
        if self.shared:
            return LowerCopy(here=False), []
        victims: list[PageKey] = []
        if len(self.copies) >= self._room(flush=feed is None):
            if not self.breaker.replaces():
                self.counts["skipped"] += 1
                return None, []
            if not len(self.ledger):
                self.counts["failures"] += 1
                return None, []
            victim, _ = self.ledger.victim(evict, version=version)
            self.ledger.remove(victim)
            del self.copies[victim]
            self.counts["evictions"] += 1
            victims.append(victim)
        copy = self.copies[key] = LowerCopy(here=False, replaces=bool(victims))
        return copy, victims

    def written(
        self, key: PageKey, copy: LowerCopy, *, length: int, users: Iterable[Hashable]
    ) -> None:
        """Take note that a page was written; it may have been dropped since."""
        self.counts["stores"] += 1
        self.counts["bytes_written"] += length
        if self.copies.get(key) is copy:
            copy.here = True
            # It comes before the pages behind it, which left host memory earlier.
            self.ledger.touch(key, rollouts=users, front=True)

    def refused(self, key: PageKey, copy: LowerCopy, error: Exception) -> bool:
        """Take note that a page was not written; return whether to drop what may be there."""
        self.refusal = error
        self.refusals += 1
        dropped = self.failed(key, copy, error)
        if not self.shared and (copy.replaces or isinstance(error, CapacityError)):
            self.breaker.refused(room=0 if copy.replaces else max(1, len(self.copies)))
        return dropped

    def failed(self, key: PageKey, copy: LowerCopy, error: Exception | None) -> bool:
        """Take note that a page is gone or was changed; return whether to drop what is there."""
        damaged = isinstance(error, CorruptionError)
        if damaged:
            self.counts["checksum_failures"] += 1
        elif error is not None:
            self.counts["failures"] += 1
        if self.shared:
            return damaged
        if isinstance(error, Recalled) and copy.here:  # not read yet: the page is as it was
            return False
        return self.copies.get(key) is copy and self.forget(key)

    def forget(self, key: PageKey) -> bool:
        """Forget a page that is to be dropped; return whether there is one."""
        if self.copies.pop(key, None) is None:
            return False
        self.ledger.remove(key)
        return True

    def here(self) -> dict[PageKey, LowerCopy]:
        """Return the copies that were written."""
        return {key: copy for key, copy in self.copies.items() if copy.here}

    def lose(self, copies: Mapping[PageKey, LowerCopy]) -> None:
        """Forget these, which the tier lost, if no newer ones took their place."""
        for key, copy in copies.items():
            if self.copies.get(key) is copy:
                self.forget(key)

    def clear(self) -> None:
        for key in list(self.copies):
            self.forget(key)

    def served(self, length: int) -> None:
        """Count a read that found its page."""
        self.counts["hits"] += 1
        self.counts["bytes_read"] += length

    def users(self, key: PageKey) -> tuple[Hashable, ...]:
        """Return the rollouts that use the page here."""
        return self.ledger.rollouts(key) if self.found(key) else ()

    def statistics(self) -> TierStatistics:
        pages = len(self.copies)
        return statistics_of(self.counts, pages=pages, capacity_pages=self.capacity_pages)

    def _room(self, *, flush: bool = False) -> int:
        if flush and len(self.copies) < self.capacity_pages:
            return self.capacity_pages
        return min(self.breaker.room, self.capacity_pages)


def in_order(tiers: Sequence[HostTier | Tier]) -> tuple[HostTier, list[Tier]]:
    """Split tiers into host memory and those below it.

    Raises:
        UnsupportedError: no host tier in front, or a tier below one that others write to.
        PlanError: the tiers differ in their page or attachment size.
    """
    names = [tier.name for tier in tiers]
    if not tiers or not isinstance(tiers[0], HostTier):
        raise UnsupportedError(
            f"the first tier must be a HostTier; got {names}. Put HostTier(...) in front."
        )
    host = tiers[0]
    below = [tier for tier in tiers[1:] if not isinstance(tier, HostTier)]
    if len(below) != len(tiers) - 1 or len(set(names)) != len(names):
        raise UnsupportedError(f"tiers need different names and one host tier; got {names}")
    if any(tier.shared for tier in below[:-1]):
        raise UnsupportedError(f"a tier that others write to must be the last; got {names}")
    sizes = {(tier.page_bytes, tier.attachment_bytes) for tier in tiers}
    if len(sizes) != 1:
        raise PlanError(f"tiers with different (page, attachment) bytes: {sorted(sizes)}")
    return host, below


def levels_of(
    tiers: Sequence[Tier], *, patience_s: float, clock: Callable[[], float]
) -> list[Level]:
    """Return a level for each tier, with the pages that it holds."""
    return [
        Level(
            tier.name,
            _keys_of(tier),
            capacity_pages=tier.capacity_pages,
            shared=tier.shared,
            patience_s=patience_s,
            clock=clock,
        )
        for tier in tiers
    ]


def _keys_of(tier: Tier) -> list[PageKey]:
    try:
        return tier.keys()
    except CorruptionError as error:  # of the tier's index: it has no pages then
        logger.warning("%s: %s", tier.name, error)
        return []


class Levels:
    """The lower tiers together, as a page in host memory sees them."""

    def __init__(self, each: Sequence[Level], evict: Evict) -> None:
        self._each = each
        self._evict = evict
        for level in each:
            level.ledger.keep(facts_of(evict))

    def have(self, page: HostPage) -> bool:
        """Whether a lower tier has the page or will have it."""
        if page.writes or page.shared:
            return True
        return any(page.key in level.copies for level in self._each)

    def write(self, page: HostPage, *, version: int, feed: int | None) -> list[Write | Drop]:
        """Write a page to each tier, unless one has it or will; `feed` as in `Level.admit`."""
        moves: list[Write | Drop] = []
        if self.have(page):
            return moves
        for depth, level in enumerate(self._each):
            copy, victims = level.admit(page.key, self._evict, version=version, feed=feed)
            for victim in victims:
                moves.append(Drop(depth, victim))
            if copy is not None:
                page.writes += 1
                level.breaker.given(write=True)
                moves.append(Write(depth, page, copy))
        return moves

    def missing(self, pages: Sequence[HostPage]) -> CapacityError | None:
        """Return an error that counts the pages that no tier has or will have."""
        missing = sum(not self.have(page) for page in pages)
        if not missing or not self._each:
            return None
        names = ", ".join(level.name for level in self._each)
        return CapacityError(
            f"{missing} of {len(pages)} pages in host memory find no room in {names}. Make that "
            "larger, or wait until a tier that refused pages is tried again."
        )

    def forget(self, key: PageKey) -> list[Drop]:
        """Forget the page of a key."""
        return [Drop(depth, key) for depth, level in enumerate(self._each) if level.forget(key)]

    def clear(self) -> list[Clear]:
        """Forget all pages."""
        for level in self._each:
            level.clear()
        return [Clear(depth) for depth in range(len(self._each))]

    def unawaited(self) -> int:
        """Count the pages whose writes are not waited for."""
        return max((level.breaker.unawaited() for level in self._each), default=0)

    def blocking(self) -> list[Recall]:
        """Return the recalls that a page waiting for a frame makes necessary."""
        return [Recall(at) for at, level in enumerate(self._each) if level.breaker.page_waits()]


def statistics_of(counts: Counter[str], *, pages: int, capacity_pages: int) -> TierStatistics:
    """Return counts as `TierStatistics`."""
    named = {name: counts[name] for name in (*_COUNTS, "bytes_written", "bytes_read")}
    return TierStatistics(**named, pages=pages, capacity_pages=capacity_pages)
