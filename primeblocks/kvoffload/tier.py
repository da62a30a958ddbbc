"""The protocol of a tier below host memory, and the values that a store returns."""

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
    """A page that is written to a tier.

    Args:
        content: the bytes of the page, then its packed attachments.
        digest: the `checksum` of key and content. The tier stores the digest, but does not
            check it.
        frame: the whole frame that begins with `content`, for I/O in units of 4096 bytes. Its
            address is a multiple of 4096.
    """

    key: PageKey
    content: np.ndarray
    digest: bytes
    frame: np.ndarray


class Found(NamedTuple):
    """A page that a tier returned: the length of its content, and its stored digest."""

    length: int
    digest: bytes


class Tier(Protocol):
    """A place for pages below host memory, such as a disk or a store on the network.

    One thread calls all methods except `holds`, which any thread may call. If `put` or `get` fails
    for one page, the page's entry in the result is the error. The call still serves the other pages
    of the batch.
    """

    @property
    def name(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def attachment_bytes(self) -> int: ...
    @property
    def capacity_pages(self) -> int:
        """The number of pages that fit before the store must evict. Ignored if `shared`."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other processes also write to the tier.

        The store does not evict from a shared tier.
        """
        ...

    def put(self, records: Sequence[Record]) -> list[PrimeblocksError | OSError | None]:
        """Write pages, and replace earlier pages with equal keys.

        Return None or an error per page.
        """
        ...

    def get(
        self, keys: Sequence[PageKey], *, into: Sequence[np.ndarray]
    ) -> list[Found | PrimeblocksError | OSError | None]:
        """Read pages into whole, aligned frames. In the result, None means a miss."""
        ...

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Remove pages, so that a store that opens the tier later cannot find these pages.

        Unknown keys are ignored.
        """
        ...

    def clear(self) -> None:
        """Remove every page, so that a store that opens the tier later finds no pages."""
        ...

    def flush(self) -> None:
        """Make all pages written so far survive a power cut, as far as the tier can."""
        ...

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return for each page whether `get` may find it."""
        ...

    def keys(self) -> list[PageKey]:
        """Return all keys, oldest first, or an empty list for a shared tier."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Saved:
    """The result of a save.

    Args:
        stored: whether the store has the page. A store may decline any page.
        reason: why the store declined the page.
    """

    stored: bool
    reason: str = ""


@dataclass(frozen=True)
class Loaded:
    """The result of a load. `bool(loaded)` is True for a found page, and False for a miss.

    Args:
        tier: the name of the tier that had the page, or None after a miss. A miss leaves `into`
            unchanged.
        attachments: the attachments saved with the page.
    """

    tier: str | None
    attachments: Mapping[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.tier is not None


@dataclass(frozen=True)
class TierStatistics:
    """Counts since the store was made.

    Args:
        hits: loads that this tier served.
        misses: loads for which this tier had no usable page.
        stores: pages written, by saves, demotions and promotions.
        evictions: pages that were evicted to make room.
        checksum_failures: pages that the store dropped, because their bytes did not match their
            checksum or could not be read in full.
        failures: reads and writes that the tier refused, for example on a full disk.
        skipped: pages not written because the tier had refused other pages or did not keep up.
        bytes_written: the bytes of pages and attachments that `stores` counts.
        bytes_read: the bytes of pages and attachments that `hits` counts.
        pages: pages in the tier now.
        capacity_pages: pages that fit, or 0 if the tier is shared.
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
