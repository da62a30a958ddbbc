"""A bounded store of page bytes by key, which detects disputed keys.

A page is *stored* until it is evicted or dropped, and also *retained* while a caller holds it.
Retained pages are never evicted. A key is *disputed* once two pages with different bytes were put
under it, because it is unknown which page a later hit means. Disputed pages are not returned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
import xxhash

from ..errors import UsageError

__all__ = ["KeptPages", "StoreStatistics"]


@dataclass(frozen=True)
class StoreStatistics:
    """Counts of pages since the store was made."""

    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    refused: int = 0
    """Not stored: no room, because every page is retained."""
    disputed: int = 0
    """Keys under which two different pages came; neither is returned."""


class KeptPages:
    """Pages of equal size by key. The least recently used page that is not retained is evicted.

    Thread-safe. Each page costs O(1). Memory is claimed as the store fills, and about 200 bytes
    more for each remembered page.

    Args:
        page_bytes: size of every page.
        capacity_bytes: room for pages.
        remembered_pages: the number of pages of which a digest is kept. A dispute with an older
            page is not noticed. None means sixteen times the pages that fit, and at least 65,536.

    Raises:
        UsageError: not even one page fits, or `remembered_pages` is less than the pages that fit.
    """

    def __init__(
        self, *, page_bytes: int, capacity_bytes: int, remembered_pages: int | None = None
    ) -> None:
        self.page_bytes = page_bytes
        self.capacity_pages = capacity_bytes // page_bytes if page_bytes > 0 else 0
        if self.capacity_pages < 1:
            raise UsageError(f"{capacity_bytes} bytes hold no page: one takes {page_bytes}")
        if remembered_pages is None:
            remembered_pages = max(16 * self.capacity_pages, 1 << 16)
        if remembered_pages < self.capacity_pages:
            raise UsageError(
                f"remembered_pages must be at least the {self.capacity_pages} that fit;"
                f" got {remembered_pages}"
            )
        self._remembered = remembered_pages
        self._room = self.capacity_pages
        self._pages: dict[Hashable, bytes] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()  # stored and not retained
        self._retained: dict[Hashable, int] = {}
        self._seen: OrderedDict[Hashable, int | None] = OrderedDict()  # None: disputed
        self._statistics = StoreStatistics()
        self._lock = Lock()

    def put(self, key: Hashable, page: np.ndarray) -> bool:
        """Copy one page into the store. Return whether `get` will find the page.

        Raises:
            UsageError: the page has another size.
        """
        if page.nbytes != self.page_bytes:
            raise UsageError(f"a page takes {self.page_bytes} bytes; got {page.nbytes}")
        digest = xxhash.xxh3_64_intdigest(page.data)
        with self._lock:
            if not self._is_the_same(key, digest):
                return False
            if key in self._pages:
                self._touch(key)
                return True
            if len(self._pages) >= self._room and not self._evict_one():
                self._count(refused=1)
                return False
            self._pages[key] = page.tobytes()
            if key not in self._retained:
                self._idle[key] = None
            self._count(stored=1)
            return True

    def get(self, keys: Sequence[Hashable], into: np.ndarray) -> None:
        """Copy pages into the rows of uint8 `[len(keys), page_bytes]`.

        If a page is missing, its row is left unchanged.
        """
        with self._lock:
            hits = 0
            for row, key in zip(into, keys, strict=True):
                page = self._pages.get(key)
                if page is not None:
                    hits += 1
                    self._touch(key)
                    row[:] = np.frombuffer(page, np.uint8)
            self._count(hits=hits, misses=len(keys) - hits)

    def retain(self, keys: Iterable[Hashable]) -> None:
        """Protect pages, present or future, from eviction until each is released as often."""
        with self._lock:
            for key in keys:
                self._retained[key] = self._retained.get(key, 0) + 1
                self._idle.pop(key, None)

    def release(self, keys: Iterable[Hashable]) -> None:
        """Undo `retain`. The last one released is the last one evicted.

        Raises:
            UsageError: a key is not retained.
        """
        with self._lock:
            for key in keys:
                count = self._retained.get(key, 0) - 1
                if count < 0:
                    raise UsageError(f"page {key!r} is not retained, so it cannot be released")
                if count:
                    self._retained[key] = count
                    continue
                del self._retained[key]
                if key in self._pages:
                    self._idle[key] = None

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Forget pages and their digests. The next page under such a key is a new page."""
        with self._lock:
            for key in keys:
                self._seen.pop(key, None)
                if key in self._pages:
                    self._forget(key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def statistics(self) -> StoreStatistics:
        return self._statistics

    def close(self) -> None:
        """Forget all pages and refuse later ones. The process may keep the memory."""
        with self._lock:
            for each in (self._pages, self._idle, self._retained, self._seen):
                each.clear()
            self._room = 0

    def _is_the_same(self, key: Hashable, digest: int) -> bool:
        """Whether only one page was ever put under `key`."""
        known = self._seen.setdefault(key, digest)
        self._seen.move_to_end(key)
        while len(self._seen) > self._remembered + len(self._retained):
            oldest, of_oldest = self._seen.popitem(last=False)
            if oldest in self._retained:
                self._seen[oldest] = of_oldest
        if known is not None and known != digest:
            # It is unknown which of the two belongs to the KV that a later hit finds.
            self._seen[key] = None
            if key in self._pages:
                self._forget(key)
            self._count(disputed=1)
        return known == digest

    def _evict_one(self) -> bool:
        if not self._idle:
            return False
        self._forget(next(iter(self._idle)))
        self._count(evicted=1)
        return True

    def _touch(self, key: Hashable) -> None:
        if key in self._idle:
            self._idle.move_to_end(key)

    def _forget(self, key: Hashable) -> None:
        del self._pages[key]
        self._idle.pop(key, None)

    def _count(self, **more: int) -> None:
        now = self._statistics
        sums = {name: getattr(now, name) + count for name, count in more.items()}
        self._statistics = replace(now, **sums)
