"""Routes that follow the KV cache: rows by page, so that a page that comes back brings its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from ..errors import ShapeError
from ..replay import Routes
from ..replay.codec import expert_dtype
from ..replay.pages import KeptPages, StoreStatistics

__all__ = ["RouteStore"]


class RouteStore:
    """Rows of whole KV pages, within a bound, the least recently used evicted first.

    An engine skips the forward of a prompt whose pages it still has, on the device or in any tier
    behind it, and then nothing computes their routes. This store remembers them under the page's
    own name. What it has forgotten is *missing*, never wrong and never an error: the trainer then
    chooses for itself.

    A key must name the page's salt and its hash, as KV caches do (vLLM's page hash contains the
    salt; `(salt, hash)` or `kvoffload.PageKey` do as well), with a salt for each policy version.
    Even so a request that runs through a weight update can compute a cached page again, and choose
    otherwise. It is not known which of the two a later hit finds, so the store remembers a digest
    of every page it saw, also of those it evicted: two different pages under one key make that key
    missing from then on. In bfloat16 that happens to every page that is computed again, so `drop` a
    key when the last KV under it goes, or better: let keys name the place where a page lies, and
    drop one when the place gets another page. Then rows always belong to the KV that is there.
    Retain the keys of each request from its start to its end.

    Everything is local, thread-safe and O(1) a page.

    Args:
        num_experts: as in `Routes`.
        layer_ids: as in `Routes`.
        top_k: as in `Routes`.
        page_tokens: tokens of a KV page.
        capacity_bytes: room for rows, claimed from the system as it fills.
        remembered_pages: of how many pages a digest is kept (about 200 bytes each); a dispute with
            one put longer ago goes unnoticed. Several times the pages of all KV tiers; by default
            sixteen times what the store holds, and at least 65,536.

    Raises:
        UsageError: not even one page fits, or fewer are to be remembered than do.
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
        """Keep a copy of the rows of one page; return whether `get` will find them.

        Raises:
            ShapeError: the routes are not one page of this model.
        """
        model = routes.num_experts, routes.layer_ids, routes.top_k
        if routes.tokens != self.page_tokens or model != self._model:
            raise ShapeError(
                f"{routes} is no page of {self.page_tokens} tokens of a model with"
                f" (num_experts, layer_ids, top_k) = {self._model}"
            )
        rows = np.ascontiguousarray(routes.experts).reshape(-1).view(np.uint8)
        return self._pages.put(key, np.concatenate([rows, routes.missing.view(np.uint8)]))

    def get(self, keys: Sequence[Hashable]) -> Routes:
        """The pages' rows, joined in order; pages that are not here are missing."""
        pages = np.zeros((len(keys), self._pages.page_bytes), dtype=np.uint8)
        pages[:, -self.page_tokens :] = True
        self._pages.get(keys, pages)
        num_experts, layer_ids, top_k = self._model
        rows = np.ascontiguousarray(pages[:, : -self.page_tokens]).view(self._dtype)
        missing = np.ascontiguousarray(pages[:, -self.page_tokens :]).view(np.bool_)
        experts = rows.reshape(-1, len(layer_ids), top_k)
        return Routes(experts, num_experts, layer_ids, missing.reshape(-1))

    def retain(self, keys: Iterable[Hashable]) -> None:
        """Keep pages, here or to come, from eviction until each is released as often."""
        self._pages.retain(keys)

    def release(self, keys: Iterable[Hashable]) -> None:
        """Undo `retain`. The last one released is the last one evicted.

        Raises:
            UsageError: a key is not retained.
        """
        self._pages.release(keys)

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Forget pages of which no KV is left in any tier; computed again, they are new pages."""
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
        """Bytes of the pages that are here."""
        return len(self._pages) * self._pages.page_bytes

    @property
    def statistics(self) -> StoreStatistics:
        return self._pages.statistics

    def close(self) -> None:
        """Forget everything; later pages are refused. The process may keep the memory."""
        self._pages.close()

    def __enter__(self) -> RouteStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
