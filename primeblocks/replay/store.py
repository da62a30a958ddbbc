"""Routes that follow the KV cache: rows by page, so that a page that comes back brings its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from types import TracebackType

import numpy as np
import xxhash

from ..errors import ShapeError, UsageError
from .codec import expert_dtype
from .routes import Routes

__all__ = ["RouteStore", "StoreStatistics"]


@dataclass(frozen=True)
class StoreStatistics:
    """Pages since the store was made."""

    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    refused: int = 0
    """Not stored: no room, because every page is retained."""
    disputed: int = 0
    """Keys under which two different pages came; neither is returned."""


class RouteStore:
    """Rows of whole KV pages, in a bounded arena, the least recently used evicted first.

    An engine skips the forward of a prompt whose pages it still has, on the device or in any tier
    behind it, and then nothing computes their routes. This store remembers them under the page's
    own name. What it has forgotten is *missing*, never wrong and never an error: the trainer then
    chooses for itself.

    A key must name the page's salt and its hash, as KV caches do (vLLM's page hash contains the
    salt; `(salt, hash)` or `kvoffload.PageKey` do as well), with a salt for each policy version.
    Even so a request that runs through a weight update can compute again what is cached already,
    and choose otherwise. Which of the two a later hit finds cannot be known, so the store remembers
    a digest of every page it saw, also of those it evicted: two different pages under one key make
    that key missing from then on. Retain the keys of each request from its start to its end.

    Everything is local, thread-safe and O(1) a page. Memory is `capacity_pages` times the page's
    rows, claimed from the system as it fills, and about 200 bytes for each remembered page.

    Args:
        num_experts: as in `Routes`.
        layer_ids: as in `Routes`.
        top_k: as in `Routes`.
        page_tokens: tokens of a KV page.
        capacity_bytes: room for rows.
        kv_pages: how many pages are remembered: at least those of all KV tiers together. None:
            sixteen times what the store holds.

    Raises:
        UsageError: not even one page fits, or `kv_pages` is fewer than do.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        layer_ids: Sequence[int],
        top_k: int,
        page_tokens: int,
        capacity_bytes: int,
        kv_pages: int | None = None,
    ) -> None:
        dtype = expert_dtype(num_experts)
        self.page_tokens = page_tokens
        page = (page_tokens, len(layer_ids), top_k)
        page_bytes = int(np.prod(page)) * dtype.itemsize + page_tokens
        self.capacity_pages = capacity_bytes // page_bytes if page_bytes > 0 else 0
        if self.capacity_pages < 1:
            raise UsageError(
                f"{capacity_bytes} bytes hold no page of {page_tokens} tokens, {len(layer_ids)}"
                f" layers and {top_k} experts: it takes {page_bytes}"
            )
        self.page_bytes = page_bytes
        self._model = num_experts, tuple(layer_ids), top_k
        self._rows = np.empty((self.capacity_pages, *page), dtype=dtype)
        self._missing = np.empty((self.capacity_pages, page_tokens), dtype=np.bool_)
        self._free = list(range(self.capacity_pages - 1, -1, -1))
        self._slots: dict[Hashable, int] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()  # stored and not retained
        self._retained: dict[Hashable, int] = {}
        self._seen: OrderedDict[Hashable, int | None] = OrderedDict()  # None: disputed
        self._remembered = 16 * self.capacity_pages if kv_pages is None else kv_pages
        if self._remembered < self.capacity_pages:
            raise UsageError(
                f"kv_pages must be at least the {self.capacity_pages} pages that fit;"
                f" got {kv_pages}"
            )
        self._statistics = StoreStatistics()
        self._lock = Lock()

    def put(self, key: Hashable, routes: Routes) -> bool:
        """Keep the rows of one page; copies them. Returns whether `get` will find them.

        Raises:
            ShapeError: the routes are not one page of this model.
        """
        if routes.tokens != self.page_tokens or routes._model != self._model:
            raise ShapeError(
                f"{routes} is no page of {self.page_tokens} tokens of a model with"
                f" (num_experts, layer_ids, top_k) = {self._model}"
            )
        with self._lock:
            if not self._is_the_same(key, routes):
                return False
            if key in self._slots:
                self._touch(key)
                return True
            if not self._free and not self._evict_one():
                self._count(refused=1)
                return False
            slot = self._free.pop()
            self._rows[slot] = routes.experts
            self._missing[slot] = routes.missing
            self._slots[key] = slot
            if key not in self._retained:
                self._idle[key] = None
            self._count(stored=1)
            return True

    def get(self, keys: Sequence[Hashable]) -> Routes:
        """The pages' rows, joined in order; pages that are not here are missing. One copy."""
        rows = np.zeros((len(keys), *self._rows.shape[1:]), dtype=self._rows.dtype)
        missing = np.ones((len(keys), self.page_tokens), dtype=np.bool_)
        with self._lock:
            hits = 0
            for page, key in enumerate(keys):
                slot = self._slots.get(key)
                if slot is not None:
                    hits += 1
                    self._touch(key)
                    rows[page] = self._rows[slot]
                    missing[page] = self._missing[slot]
            self._count(hits=hits, misses=len(keys) - hits)
        num_experts, layer_ids, _ = self._model
        flat = rows.reshape(-1, *rows.shape[2:])
        return Routes(flat, num_experts, layer_ids, missing.reshape(-1))

    def retain(self, keys: Iterable[Hashable]) -> None:
        """Evict these pages no more, here or to come, until each is released as often."""
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
                if key in self._slots:
                    self._idle[key] = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are here."""
        return len(self._slots) * self.page_bytes

    @property
    def statistics(self) -> StoreStatistics:
        return self._statistics

    def close(self) -> None:
        """Forget everything and give the memory back."""
        with self._lock:
            self._slots.clear()
            self._idle.clear()
            self._retained.clear()
            self._seen.clear()
            self._free = []
            self._rows = self._rows[:0].copy()
            self._missing = self._missing[:0].copy()

    def __enter__(self) -> RouteStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _is_the_same(self, key: Hashable, routes: Routes) -> bool:
        """Whether these rows are the only ones that were ever put under `key`."""
        found = xxhash.xxh3_64_intdigest(np.ascontiguousarray(routes.experts).data)
        if routes.missing.any():
            found ^= xxhash.xxh3_64_intdigest(np.packbits(routes.missing).data)
        known = self._seen.setdefault(key, found)
        self._seen.move_to_end(key)
        while len(self._seen) > self._remembered + len(self._retained):
            oldest, digest = self._seen.popitem(last=False)
            if oldest in self._retained:
                self._seen[oldest] = digest
        if known is not None and known != found:
            self._seen[key] = None
            if key in self._slots:
                self._forget(key)
            self._count(disputed=1)
        return known == found

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
        self._free.append(self._slots.pop(key))
        self._idle.pop(key, None)

    def _count(self, **more: int) -> None:
        now = self._statistics
        sums = {name: getattr(now, name) + count for name, count in more.items()}
        self._statistics = replace(now, **sums)
