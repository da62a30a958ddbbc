"""A tier below host memory, and what a store reports about every tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import PrimeblocksError
from .page import PageKey

__all__ = ["Found", "Loaded", "Record", "Saved", "Tier", "TierStatistics"]


@dataclass(frozen=True, slots=True)
class Record:
    """A page on its way into a tier.

    Args:
        content: bytes of the page, then its packed attachments; starts at a multiple of 4096.
        digest: `checksum` of both; the tier keeps it and does not compare it.
        frame: the whole frame that `content` begins, for I/O in units of 4096 bytes.
    """

    key: PageKey
    content: np.ndarray
    digest: bytes
    frame: np.ndarray | None = None


class Found(NamedTuple):
    """A page that a tier had: the length of its content and the digest it came with."""

    length: int
    digest: bytes


class Tier(Protocol):
    """A place for pages below host memory: a disk, a store on the network.

    One thread calls it, except for `holds`. An error of one page is returned in its
    place, not raised, so that a bad page does not fail its batch.
    """

    @property
    def name(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def attachment_bytes(self) -> int: ...
    @property
    def capacity_pages(self) -> int:
        """Pages that fit; the store evicts before it puts more. Ignored if `shared`."""
        ...

    @property
    def shared(self) -> bool:
        """Whether others write to it too: then the store asks what it holds and does not evict."""
        ...

    def put(self, records: Sequence[Record]) -> list[PrimeblocksError | OSError | None]:
        """Keep pages, each in place of what its key named before; None, or the error."""
        ...

    def get(
        self, keys: Sequence[PageKey], *, into: Sequence[np.ndarray]
    ) -> list[Found | PrimeblocksError | OSError | None]:
        """Read pages into whole, aligned frames; None is a miss."""
        ...

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Forget pages, also for whoever opens the tier next; unknown keys are ignored."""
        ...

    def clear(self) -> None:
        """Forget every page, also for whoever opens the tier next."""
        ...

    def flush(self) -> None:
        """Make what was put survive a power cut, as far as the tier can."""
        ...

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Tell for each page whether `get` may find it."""
        ...

    def keys(self) -> list[PageKey]:
        """Return all keys, oldest first; an empty list if `shared`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Saved:
    """The result of a save.

    Args:
        stored: whether the store holds the page; a store may always decline.
        reason: why it does not.
    """

    stored: bool
    reason: str = ""


@dataclass(frozen=True)
class Loaded:
    """The result of a load, a page or a miss; true for a page.

    Args:
        tier: name of the tier that had the page; None for a miss, which leaves `into` as it was.
        attachments: those saved with the page.
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
        skipped: pages that were not written, because the tier refused others or did not keep up.
        bytes_written: page and attachment bytes of `stores`.
        bytes_read: page and attachment bytes of `hits`.
        pages: pages held now.
        capacity_pages: pages that fit; 0 if the tier is shared.
    """

    hits: int
    misses: int
    stores: int
    evictions: int
    checksum_failures: int
    failures: int
    skipped: int
    bytes_written: int
    bytes_read: int
    pages: int
    capacity_pages: int
