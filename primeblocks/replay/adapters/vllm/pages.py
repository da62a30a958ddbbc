"""The store that vLLM's capture gets instead of its own: what it forgot is missing, not fatal."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...pages import PageArena, StoreStatistics

__all__ = ["CapturedPages"]


class CapturedPages:
    """The interface of vLLM 0.32's `BlockObjectStore` over a `PageArena`.

    vLLM raises for a page that it evicted, or that a tier kept over a reset of the prefix cache,
    and the engine dies. Here such a page is filled with the largest number in every slot: no
    router names one expert twice, so `routes_from_output` knows it (with one expert a token out of
    256 or 65,536, and no dense layer, a row that really chose the last expert in every layer is
    taken for missing too). The plug-in puts this class in place; the patch is
    `missing_routes_survive`.

    Args:
        max_bytes: room for rows, of `aux_output_config`.
        object_nbytes: bytes of one page's rows.
    """

    def __init__(self, *, max_bytes: int, object_nbytes: int) -> None:
        self.object_nbytes = object_nbytes
        self._pages = PageArena(page_bytes=object_nbytes, capacity_bytes=max_bytes)
        self.num_slots = self._pages.capacity_pages

    def put(
        self,
        objects: Iterable[Any],
        *,
        retain_keys: Iterable[str] = (),
        release_keys: Iterable[str] = (),
    ) -> None:
        """Keep pages; without room they are missing later."""
        self._pages.retain(retain_keys)
        self._pages.release(release_keys)
        for each in objects:
            self._pages.put(each.key, np.frombuffer(each.payload, dtype=np.uint8))

    def get_concatenated(self, keys: list[str]) -> bytes:
        """The pages' rows, joined."""
        pages = np.full((len(keys), self.object_nbytes), 0xFF, dtype=np.uint8)
        self._pages.get(keys, pages)
        return pages.tobytes()

    @property
    def statistics(self) -> StoreStatistics:
        return self._pages.statistics

    def close(self) -> None:
        self._pages.close()
