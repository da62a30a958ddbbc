"""One tier as the store knows it: its pages, its counts, and whether it keeps up."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from time import monotonic

from ...errors import CapacityError, CorruptionError, PlanError, UnsupportedError
from ..evict import Evict, facts_of
from ..evict.ledger import Ledger
from ..host import HostTier
from ..page import PageKey
from ..tier import Tier, TierStatistics
from .moves import Clear, Copy, Drop, HostPage, Recall, Recalled, Write

__all__ = ["Level", "Levels", "in_order", "levels_of", "statistics_of"]

logger = logging.getLogger(__name__)

_REST_S = 1.0  # until a tier that refused is tried again, twice as long each time
_LONGEST_REST_S = 8.0
_COUNTS = ("hits", "misses", "stores", "evictions", "checksum_failures", "failures", "skipped")


class Level:
    """A lower tier: its copies, its ledger, its counts. A shared tier has counts alone.

    Where a page did not fit, the tier counts as full, and pages take the place of others. Where
    that fails too, no page leaves for another. Either way one page is tried after a while: if it
    fits, all is as before.

    Args:
        keys: pages that the tier holds already, oldest first.
        patience_s: seconds that pages wait for this tier before it counts as late, or as hung.
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
        self.copies = {key: Copy(here=True) for key in keys}
        self.ledger = Ledger(self.copies)
        self.counts: Counter[str] = Counter()
        self.refusal: Exception | None = None  # the last of a write
        self.refusals = 0
        self._coming: set[PageKey] = set()  # not in the ledger yet
        self._patience_s, self._clock = patience_s, clock
        self._room = self.capacity_pages  # less while the tier is fuller than its quota says
        self._closed = False  # to pages for which others would have to leave
        self._again_s, self._rest_s = 0.0, _REST_S
        self._trial: Copy | None = None
        self.writing = self._moving = 0
        self._heard_s = 0.0
        self._blocked_s: float | None = None  # since when a page waits
        self._late_s: float | None = None  # when a page was skipped last
        self._recalled = self._silent = False

    def found(self, key: PageKey) -> Copy | None:
        """Return the copy that a read would find. A shared tier has to be asked instead."""
        copy = self.copies.get(key)
        return copy if copy is not None and copy.here else None

    def admit(
        self, key: PageKey, evict: Evict, *, version: int, flush: bool = False
    ) -> tuple[Copy | None, list[PageKey]]:
        """Make room for a page; return its copy, or None, and the keys of pages that leave for it.

        A flush tries all its pages where otherwise one is tried.
        """
        if self.shared:
            return Copy(here=False), []
        trial = self._trial_is_due()
        room = min(self._room + trial, self.capacity_pages)
        if flush and self._clock() >= self._again_s:
            room = self.capacity_pages
        if self._closed and not trial and len(self.copies) >= room:
            self.counts["skipped"] += 1
            return None, []
        victims: list[PageKey] = []
        while len(self.copies) >= room and len(self.copies) > len(self._coming):
            victim, _ = self.ledger.victim(evict, version=version)
            self.ledger.remove(victim)
            del self.copies[victim]
            self.counts["evictions"] += 1
            victims.append(victim)
        if len(self.copies) >= room:
            self.counts["failures"] += 1
            return None, victims
        copy = self.copies[key] = Copy(here=False, instead=bool(victims))
        self._trial = copy if trial else self._trial
        self._coming.add(key)
        return copy, victims

    def written(self, key: PageKey, copy: Copy, *, length: int, users: Iterable[Hashable]) -> None:
        """Take note that a page was written; it may have been dropped since."""
        self.counts["stores"] += 1
        self.counts["bytes_written"] += length
        if copy is self._trial:
            self._trial, self._room, self._rest_s = None, self.capacity_pages, _REST_S
            self._closed = False
        elif not self._troubled():
            self._rest_s = _REST_S
        if self.copies.get(key) is copy:
            copy.here = True
            self._coming.discard(key)
            # It comes before the pages behind it, which left host memory earlier.
            self.ledger.touch(key, rollouts=users, front=True)

    def refused(self, key: PageKey, copy: Copy, error: Exception) -> bool:
        """Take note that a page was not written; return whether to drop what may be there."""
        self.refusal = error
        self.refusals += 1
        dropped = self.failed(key, copy, error)
        if isinstance(error, CapacityError) and not self.shared:
            self._room = max(1, len(self.copies))
        self._closed |= copy.instead
        if copy is self._trial:
            self._trial = None
        self._rest()
        return dropped

    def failed(self, key: PageKey, copy: Copy, error: Exception | None) -> bool:
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
        self._coming.discard(key)
        return True

    def here(self) -> dict[PageKey, Copy]:
        """Return the copies that were written."""
        return {key: copy for key, copy in self.copies.items() if copy.here}

    def lose(self, copies: Mapping[PageKey, Copy]) -> None:
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

    # Whether it keeps up.

    def given(self, *, write: bool) -> None:
        """Take note that the tier has a move to answer."""
        if not self._moving:
            self._heard_s = self._clock()
        self._moving += 1
        self.writing += write
        self._recalled = False

    def heard(self, error: Exception | None, *, write: bool) -> None:
        """Take note that the tier answered a move, or did not begin it."""
        self._moving -= 1
        self.writing -= write
        self._silent = isinstance(error, Recalled)
        if self._silent:
            self._rest()
        else:
            self._heard_s = self._clock()
            self._recalled = False
        if not self.writing:
            self._blocked_s = None

    def page_waits(self) -> bool:
        """Take note that a page waits for room; return whether to recall moves not begun."""
        if self.writing and self._blocked_s is None:
            self._blocked_s = self._clock()
        recall = not self._recalled and self.hung()
        self._recalled |= recall
        return recall

    def late(self) -> bool:
        """Whether pages had to wait too long for its writes, or have been skipped since."""
        if self._late_s is None and self._blocked_s is None:
            return False
        now_s, since_s = self._clock(), self._blocked_s
        if self._late_s is None and since_s is not None and now_s - since_s > self._patience_s:
            self._late_s = now_s
        if self._late_s is not None and not self.writing:
            self._late_s = self._late_s if now_s - self._late_s <= self._patience_s else None
        return self._late_s is not None

    def skips(self, *, feed: int | None) -> bool:
        """Tell whether to skip a page. A late tier is kept at `feed` writes; None skips none."""
        if feed is None or not (self.hung() or (self.late() and self.writing >= feed)):
            return False
        self.counts["skipped"] += 1
        self._late_s = self._clock()
        return True

    def hung(self) -> bool:
        """Whether the tier has not answered for too long, and is left alone for a while."""
        if self._moving and self._clock() - self._heard_s > self._patience_s:
            return True
        return self._silent and self._clock() < self._again_s

    def statistics(self) -> TierStatistics:
        pages = len(self.copies)
        return statistics_of(self.counts, pages=pages, capacity_pages=self.capacity_pages)

    def _rest(self) -> None:
        if self._clock() >= self._again_s:  # only the first of pages refused together counts
            self._again_s = self._clock() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)

    def _troubled(self) -> bool:
        return self._closed or self._room < self.capacity_pages

    def _trial_is_due(self) -> bool:
        return self._troubled() and self._trial is None and self._clock() >= self._again_s


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
        """Write a page to each tier, unless one has it or will; `feed` as in `Level.skips`."""
        moves: list[Write | Drop] = []
        if self.have(page):
            return moves
        for depth, level in enumerate(self._each):
            if level.skips(feed=feed):
                continue
            flush = feed is None
            copy, victims = level.admit(page.key, self._evict, version=version, flush=flush)
            for victim in victims:
                moves.append(Drop(depth, victim))
            if copy is not None:
                page.writes += 1
                level.given(write=True)
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

    def late(self) -> int:
        """Count the pages whose writes are not waited for."""
        most = 0
        for level in self._each:
            if level.late():
                most = max(most, level.writing)
        return most

    def blocking(self) -> list[Recall]:
        """Return the recalls that a page waiting for a frame makes necessary."""
        return [Recall(depth) for depth, level in enumerate(self._each) if level.page_waits()]


def statistics_of(counts: Counter[str], *, pages: int, capacity_pages: int) -> TierStatistics:
    """Return counts as `TierStatistics`."""
    named = {name: counts[name] for name in (*_COUNTS, "bytes_written", "bytes_read")}
    return TierStatistics(**named, pages=pages, capacity_pages=capacity_pages)
