"""Routes stored by KV page, so that a cached page keeps the routes of its tokens.

A page's rows are put once, when the engine computed them. They stay while a request retains the
page's key, and are otherwise evicted, the least recently used first. A digest of each page outlives
its rows. If a second page under the same key has another digest, the key is *disputed*, because it
is unknown which page a later hit means. It stays missing until `drop`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
import xxhash

from ..errors import ShapeError, UsageError
from ..replay import Routes
from ..replay.codec import expert_dtype

__all__ = ["RouteStore", "StoreStatistics"]


class RouteStore:
    """Rows of whole KV pages in bounded memory, with the least recently used evicted first.

    An engine skips the forward of cached pages, on the device or in any other tier. Their routes
    are then not computed again. This store keeps them under the page's key. An evicted page is
    *missing*: never wrong and never an error. The trainer then uses its own choice.

    **Keys.** A key must name the page's salt and hash, with a salt for each policy version, as KV
    caches do. The page hash of vLLM contains the salt. `(salt, hash)` and `kvoffload.PageKey` also
    work. Retain the keys of each request from its start to its end.

    **Pages that are computed again.** A request that runs through a weight update can compute a
    cached page again, and choose other experts. The store cannot know which of the two pages a
    later hit finds. So it remembers a digest of every page that was put, also after eviction. If
    two pages under one key differ, the key is missing from then on.

    In bfloat16 every page that is computed again differs. Call `drop` with a key when the last KV
    under the key is removed. A better way is a key that names the place of a page in the cache.
    Drop that key when the place gets another page. Rows then always belong to the stored KV.

    Local and thread-safe. Each page takes constant time.

    Args:
        num_experts: as in `Routes`.
        layer_ids: as in `Routes`.
        top_k: as in `Routes`.
        page_tokens: tokens of a KV page.
        capacity_bytes: room for rows, which is allocated as the store fills.
        remembered_pages: the number of digests to keep, at about 200 bytes each. The store does not
            notice a difference from a page without a digest. Pass several times the pages of all KV
            tiers. Default: sixteen times the pages that the store holds, and at least 65,536.

    Raises:
        UsageError: the capacity is below one page, or `remembered_pages` is below the capacity.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        layer_ids: Sequence[int],
        top_k: int,
        page_tokens: int,
        capacity_bytes: int,
        remembered_pages: int | None = None,
    ) -> None:
        self.page_tokens = page_tokens
        self._model = num_experts, tuple(layer_ids), top_k
        self._dtype = expert_dtype(num_experts)
        rows_bytes = page_tokens * len(layer_ids) * top_k * self._dtype.itemsize
        self._pages = _KeptPages(
            page_bytes=rows_bytes + page_tokens,
            capacity_bytes=capacity_bytes,
            remembered_pages=remembered_pages,
        )

    def put(self, key: Hashable, routes: Routes) -> bool:
        """Store a copy of the rows of one page. Return whether `get` will find them.

        Raises:
            ShapeError: the routes are not one page of this model.
        """
        model = routes.num_experts, routes.layer_ids, routes.top_k
        if routes.tokens != self.page_tokens or model != self._model:
            raise ShapeError(
                f"{routes} is no page of {self.page_tokens} tokens of a model with"
                f" (num_experts, layer_ids, top_k) = {self._model}. Put one whole page."
            )
        rows = np.ascontiguousarray(routes.experts).reshape(-1).view(np.uint8)
        return self._pages.put(key, np.concatenate([rows, routes.missing.view(np.uint8)]))

    def get(self, keys: Sequence[Hashable]) -> Routes:
        """Return the rows of the pages, joined in order. Pages without rows are missing."""
        pages = np.zeros((len(keys), self._pages.page_bytes), dtype=np.uint8)
        pages[:, -self.page_tokens :] = True
        self._pages.get(keys, pages)
        num_experts, layer_ids, top_k = self._model
        rows = np.ascontiguousarray(pages[:, : -self.page_tokens]).view(self._dtype)
        missing = np.ascontiguousarray(pages[:, -self.page_tokens :]).view(np.bool_)
        experts = rows.reshape(-1, len(layer_ids), top_k)
        return Routes(experts, num_experts, layer_ids, missing.reshape(-1))

    def retain(self, keys: Iterable[Hashable]) -> None:
        """Protect pages from eviction, also future ones, until each is released as often."""
        self._pages.retain(keys)

    def release(self, keys: Iterable[Hashable]) -> None:
        """Undo `retain`. Pages that are released later are evicted later.

        Raises:
            UsageError: a key is not retained.
        """
        self._pages.release(keys)

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Remove pages whose KV was removed from all tiers. Under these keys new pages may come."""
        self._pages.drop(keys)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def capacity_pages(self) -> int:
        return self._pages.capacity_pages

    @property
    def nbytes(self) -> int:
        """Bytes of the stored pages."""
        return len(self._pages) * self._pages.page_bytes

    @property
    def statistics(self) -> StoreStatistics:
        return self._pages.statistics

    def close(self) -> None:
        """Remove all pages, and refuse later ones. The process may keep the memory."""
        self._pages.close()

    def __enter__(self) -> RouteStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


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


class _KeptPages:
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
