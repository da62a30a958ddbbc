"""One tier: what a store asks of it, and what a store reports about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .ledger import Ledger
from .page import PageKey

__all__ = ["Level", "Loaded", "Saved", "Tier", "TierStatistics"]


class Tier(Protocol):
    """Where pages are kept. Called by one thread; only `in` may come from others."""

    @property
    def name(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def attachment_bytes(self) -> int: ...
    @property
    def capacity_pages(self) -> int: ...
    def put(self, key: PageKey, content: np.ndarray, digest: bytes) -> None: ...
    def get(self, key: PageKey, *, into: np.ndarray) -> tuple[int, bytes] | None: ...
    def drop(self, key: PageKey) -> None: ...
    def keys(self) -> list[PageKey]: ...
    def close(self) -> None: ...
    def __contains__(self, key: object) -> bool: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Saved:
    """What became of a save.

    Args:
        stored: whether the store holds the page; a store may always decline.
        reason: why not.
    """

    stored: bool
    reason: str = ""


@dataclass(frozen=True)
class Loaded:
    """A page or a miss; true for a page.

    Args:
        tier: name of the tier that had the page; None for a miss, which leaves `into` as it was.
        attachments: what was saved with the page.
    """

    tier: str | None
    attachments: Mapping[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.tier is not None


@dataclass(frozen=True)
class TierStatistics:
    """Counts since the store was made.

    Args:
        hits: loads served.
        misses: loads that found nothing usable here.
        stores: pages written, by saves, demotions and promotions.
        evictions: pages that left for want of room.
        checksum_failures: pages found torn, changed or gone, and dropped.
        failures: reads and writes that the tier refused, a full disk included.
        bytes_written: page and attachment bytes of `stores`.
        bytes_read: page and attachment bytes of `hits`.
        pages: pages held now.
        capacity_pages: pages that fit.
    """

    hits: int
    misses: int
    stores: int
    evictions: int
    checksum_failures: int
    failures: int
    bytes_written: int
    bytes_read: int
    pages: int
    capacity_pages: int


class Level:
    """A tier with what the store knows about it: its ledger and counts."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.ledger = Ledger(tier.keys(), capacity_pages=tier.capacity_pages)
        self.counts: Counter[str] = Counter()

    def drop(self, key: PageKey) -> None:
        self.tier.drop(key)
        self.ledger.remove(key)

    def evict(self, key: PageKey) -> None:
        self.tier.drop(key)
        self.ledger.evicted(key)
        self.counts["evictions"] += 1

    def statistics(self) -> TierStatistics:
        names = ("hits", "misses", "stores", "evictions", "checksum_failures", "failures")
        counts = {name: self.counts[name] for name in (*names, "bytes_written", "bytes_read")}
        return TierStatistics(
            **counts, pages=len(self.tier), capacity_pages=self.tier.capacity_pages
        )
