"""Lower tiers as the store knows them: their pages, their counts, their circuit breakers.

A save never fails because of a lower tier. A page that is demoted from host memory is written to
all lower tiers at once, unless one of them has the page. If a tier is full, each further page takes
the place of one of its pages. A save first drops the older copies of its key in all tiers that are
not shared, even if the save is then declined.

A circuit breaker decides how many pages a tier gets, from how it handled the pages before.

- CLOSED: every page is written. Saves wait for the tier, at most `patience_s`.
- OPEN: the tier takes `room` pages, and each further page takes the place of another. If `room` is
  0, pages are not written. A silent tier is neither written to nor read.
- HALF_OPEN: after a rest, one write at a time, or a few to a slow tier. Saves do not wait for them.

The breaker changes its state when:

- CLOSED -> HALF_OPEN: a page waited for the tier's writes longer than `patience_s`.
- any -> OPEN: the tier was full, and `room` becomes the number of its pages.
- any -> OPEN: the tier refused a page for which another had left, and `room` becomes 0.
- any -> OPEN: the tier was silent for `patience_s`.
- OPEN -> HALF_OPEN: the rest is over, or a silent tier answered.
- HALF_OPEN -> CLOSED: a page was written. If the tier was slow or silent, its moves must also be
  over, and it must not have skipped a page for `patience_s`.

A rest takes 1 s, then 2, 4 and 8 s, because each trial may cost the tier a page. It is not longer,
so that a disk with new room does not wait long. After CLOSED the next rest takes 1 s again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum, auto

from ..errors import CapacityError, CorruptionError, PlanError, UnsupportedError
from .evict import Evict
from .evict.ledger import PageLedger
from .moves import HostPage, LowerCopy, Recalled
from .page import PageKey
from .tier import HostTier, Tier, TierStatistics

__all__ = ["Breaker", "Circuit", "Level", "in_order", "is_below", "no_room", "statistics_of"]

logger = logging.getLogger(__name__)

_REST_S, _LONGEST_REST_S = 1.0, 8.0
_UNBOUNDED = 1 << 62


class Circuit(Enum):
    """The state of a breaker. The head of this file explains the states."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class Breaker:
    """The circuit breaker of one tier. `writing` is the number of running writes."""

    def __init__(self, *, patience_s: float, clock: Callable[[], float]) -> None:
        self.writing = self._moving = 0
        self._patience_s, self._clock = patience_s, clock
        self._circuit = Circuit.CLOSED
        self._rest_s = _REST_S
        self._retry_s = 0.0  # end of the rest
        self.room = _UNBOUNDED
        self._silent = False
        self._slow = False  # half open because it was slow or silent
        self._proven = False  # a page was written since it was half open, or it was only slow
        self._skipped_s = 0.0  # when a page was skipped last
        self._heard_s = 0.0
        self._waits_s: float | None = None  # since when a page waits for the writes under way
        self._recalled = False  # no move was given since the last recall

    def circuit(self) -> Circuit:
        """Return the state. Reads the clock."""
        if self._circuit is Circuit.CLOSED and not self._moving:
            return self._circuit
        now_s = self._clock()
        if self._moving and now_s - self._heard_s > self._patience_s:
            self._silent = True
            self._open(now_s)
        elif self._circuit is Circuit.OPEN and now_s >= self._retry_s:
            self._half_open(now_s, slow=self._silent, proven=False)
        elif self._circuit is Circuit.CLOSED and self._waited_s(now_s) > self._patience_s:
            self._half_open(now_s, slow=True, proven=True)
        elif self._circuit is Circuit.HALF_OPEN and self._keeps_up(now_s):
            self._circuit, self._rest_s = Circuit.CLOSED, _REST_S
        return self._circuit

    def silent(self) -> bool:
        """Whether the tier does not answer, so that the store does not use it."""
        return self.circuit() is Circuit.OPEN and self._silent

    def skips(self, *, feed: int | None) -> bool:
        """Whether to skip a page.

        A slow tier gets at most `feed` writes at a time. With None, no page is skipped.
        """
        circuit = self.circuit()
        if circuit is Circuit.CLOSED or feed is None:
            return False
        match circuit:
            case Circuit.OPEN:
                skipped = self._silent or self.room == 0 or (self._late() and self.writing >= feed)
            case Circuit.HALF_OPEN:
                skipped = self.writing >= (feed if self._proven else 1)
        if skipped:
            self._skipped_s = self._clock()
        return skipped

    def unawaited(self) -> int:
        """Count the writes that saves do not wait for."""
        circuit = self.circuit()
        waits = circuit is Circuit.OPEN and not self._silent and not self._late()
        return 0 if waits or circuit is Circuit.CLOSED else self.writing

    def replaces(self) -> bool:
        """Whether a page may replace another page. After a rest, one page at a time may."""
        match self.circuit():
            case Circuit.CLOSED:
                return True
            case Circuit.OPEN:
                return self.room > 0
            case Circuit.HALF_OPEN:
                return self._proven or self.writing == 0

    def given(self, *, write: bool) -> None:
        if not self._moving:
            self._heard_s = self._clock()
        self._moving += 1
        self.writing += write
        self._recalled = False

    def heard(self, error: Exception | None, *, write: bool) -> None:
        now_s = self._clock()
        self._moving -= 1
        self.writing -= write
        if not self.writing:
            self._waits_s = None
        if isinstance(error, Recalled):
            self._silent = True
            self._open(now_s)
            return
        self._heard_s, self._recalled = now_s, False
        if self._silent:
            self._half_open(now_s, slow=True, proven=False)
        if write and error is None and self._circuit is Circuit.HALF_OPEN:
            self._proven = True
            if not self._slow:
                self._circuit, self._rest_s = Circuit.CLOSED, _REST_S

    def refused(self, *, room: int) -> None:
        """Note that the tier refused a page. Until the next trial it gets at most `room` pages."""
        self.room = min(self.room, room)
        self._open(self._clock())

    def page_waits(self) -> bool:
        """Note that a page waits for room. Return whether to recall moves that have not begun."""
        if self.writing and self._waits_s is None:
            self._waits_s = self._clock()
        recall = self._moving > 0 and self.silent() and not self._recalled
        self._recalled |= recall
        return recall

    def _open(self, now_s: float) -> None:
        if self._circuit is not Circuit.OPEN or now_s >= self._retry_s:  # of many, the first counts
            self._retry_s = now_s + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        self._circuit = Circuit.OPEN

    def _half_open(self, now_s: float, *, slow: bool, proven: bool) -> None:
        self._circuit, self._silent, self.room = Circuit.HALF_OPEN, False, _UNBOUNDED
        self._slow, self._proven, self._skipped_s = slow, proven, now_s

    def _keeps_up(self, now_s: float) -> bool:
        skipped_s = now_s - self._skipped_s
        return self._proven and not self.writing and skipped_s > self._patience_s

    def _late(self) -> bool:
        return self._waited_s(self._clock()) > self._patience_s

    def _waited_s(self, now_s: float) -> float:
        return 0.0 if self._waits_s is None else now_s - self._waits_s


class Level:
    """A lower tier: its copies, `PageLedger` and counts. A shared tier has only counts."""

    def __init__(
        self, tier: Tier, evict: Evict, *, patience_s: float, clock: Callable[[], float]
    ) -> None:
        self.name, self.shared = tier.name, tier.shared
        self.capacity_pages = 0 if tier.shared else tier.capacity_pages
        try:
            keys = tier.keys()
        except CorruptionError as error:  # of the tier's index: it has no pages then
            logger.warning("%s: %s", tier.name, error)
            keys = []
        self.copies = {key: LowerCopy(here=True) for key in keys}
        self.ledger = PageLedger(evict, self.copies)  # of those that are here
        self.counts: Counter[str] = Counter()
        self.refusal: Exception | None = None  # the last of a write
        self.refusals = 0
        self.breaker = Breaker(patience_s=patience_s, clock=clock)

    def found(self, key: PageKey) -> LowerCopy | None:
        """Return the copy that a read would find. For a shared tier, use `Ask` instead."""
        copy = self.copies.get(key)
        return copy if copy is not None and copy.here else None

    def admit(
        self, key: PageKey, *, version: int, feed: int | None
    ) -> tuple[LowerCopy | None, PageKey | None]:
        """Make room for a page. Return its copy, and the key of the page that leaves for it.

        Without a copy the page is not written. A flush passes None as `feed`. Then a page is
        skipped only if another page would have to leave a tier that is on trial.
        """
        if self.breaker.skips(feed=feed):
            self.counts["skipped"] += 1
            return None, None
        if self.shared:
            return LowerCopy(here=False), None
        victim = None
        room = self.capacity_pages if feed is None else min(self.breaker.room, self.capacity_pages)
        if len(self.copies) >= room:
            if not self.breaker.replaces():
                self.counts["skipped"] += 1
                return None, None
            if not len(self.ledger):
                self.counts["failures"] += 1
                return None, None
            victim, _ = self.ledger.victim(version=version)
            self.ledger.remove(victim)
            del self.copies[victim]
            self.counts["evictions"] += 1
        copy = self.copies[key] = LowerCopy(here=False, replaces=victim is not None)
        return copy, victim

    def written(
        self, key: PageKey, copy: LowerCopy, *, length: int, users: Iterable[Hashable]
    ) -> None:
        """Note that a page was written. It may have been dropped since."""
        self.counts["stores"] += 1
        self.counts["bytes_written"] += length
        if self.copies.get(key) is copy:
            copy.here = True
            # It comes before the pages behind it, which left host memory earlier.
            self.ledger.touch(key, rollouts=users, front=True)

    def refused(self, key: PageKey, copy: LowerCopy, error: Exception) -> bool:
        """Note that a page was not written. Return whether to drop a page that may be there."""
        self.refusal = error
        self.refusals += 1
        dropped = self.failed(key, copy, error)
        if not self.shared and (copy.replaces or isinstance(error, CapacityError)):
            self.breaker.refused(room=0 if copy.replaces else max(1, len(self.copies)))
        return dropped

    def failed(self, key: PageKey, copy: LowerCopy, error: Exception | None) -> bool:
        """Note that a page was lost or changed. Return whether to drop a page that is there."""
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
        """Forget a page before it is dropped. Return whether the tier had the page."""
        if self.copies.pop(key, None) is None:
            return False
        self.ledger.remove(key)
        return True

    def lose(self, copies: Mapping[PageKey, LowerCopy]) -> None:
        """Forget pages that the tier lost, unless newer pages took their place."""
        for key, copy in copies.items():
            if self.copies.get(key) is copy:
                self.forget(key)

    def clear(self) -> None:
        for key in list(self.copies):
            self.forget(key)

    def statistics(self) -> TierStatistics:
        pages = len(self.copies)
        return statistics_of(self.counts, pages=pages, capacity_pages=self.capacity_pages)


def in_order(tiers: Sequence[HostTier | Tier]) -> tuple[HostTier, list[Tier]]:
    """Split tiers into host memory and those below it. Raises the errors of `TieredStore`."""
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
        raise UnsupportedError(f"a shared tier must be the last; got {names}")
    sizes = {(tier.page_bytes, tier.attachment_bytes) for tier in tiers}
    if len(sizes) != 1:
        raise PlanError(f"all tiers need equal (page, attachment) bytes; got {sorted(sizes)}")
    return host, below


def is_below(page: HostPage, levels: Iterable[Level]) -> bool:
    """Whether a lower tier has the page or will have it."""
    return page.writes > 0 or page.shared or any(page.key in level.copies for level in levels)


def no_room(pages: Sequence[HostPage], levels: Sequence[Level]) -> CapacityError | None:
    """Return an error with the number of pages that all tiers lack."""
    missing = sum(not is_below(page, levels) for page in pages)
    if not missing or not levels:
        return None
    names = ", ".join(level.name for level in levels)
    return CapacityError(
        f"{missing} of {len(pages)} pages in host memory do not fit into {names}. Make these "
        "tiers larger, or wait until a tier that refused pages is tried again."
    )


def statistics_of(counts: Counter[str], *, pages: int, capacity_pages: int) -> TierStatistics:
    held = {"pages": pages, "capacity_pages": capacity_pages}
    named = {field.name: counts[field.name] for field in fields(TierStatistics)}
    return TierStatistics(**named | held)
