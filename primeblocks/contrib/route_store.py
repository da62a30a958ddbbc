"""Routes stored by KV page, so that a cached page keeps the routes of its tokens.

A page's rows are put once, when the engine computed them. They stay while a request retains the
page's key, and are otherwise evicted, the least recently used first. A digest of each page outlives
its rows. If a second page under the same key has another digest, the key stays missing until
`drop`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from ..errors import ShapeError
from ..replay import Routes
from ..replay.codec import expert_dtype
from ..replay.pages import KeptPages, StoreStatistics

__all__ = ["RouteStore"]


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
        self._pages = KeptPages(
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
