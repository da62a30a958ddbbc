"""Rows that vLLM captures, stored by the position of a KV page or by its hash."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...pages import KeptPages, StoreStatistics

__all__ = ["CapturedPages", "RowTable"]


class CapturedPages:
    """The interface of vLLM 0.32's `BlockObjectStore` over a `KeptPages`.

    vLLM raises an error for a page that it evicted, or that a tier kept over a reset of the prefix
    cache. The engine then dies. Here such a page is filled with the largest number in every slot.
    No router names one expert twice, so `routes_from_output` recognises it.

    With one expert per token out of 256 or 65,536, and no dense layer, one real row looks the same.
    A row that chose the last expert in every layer is then taken for missing. The plug-in's patch
    `missing_routes_survive` puts this class in place.

    Args:
        max_bytes: room for rows, from `aux_output_config`.
        object_nbytes: bytes of one page's rows.
    """

    def __init__(self, *, max_bytes: int, object_nbytes: int) -> None:
        self.object_nbytes = object_nbytes
        self._pages = KeptPages(page_bytes=object_nbytes, capacity_bytes=max_bytes)
        self.num_slots = self._pages.capacity_pages

    def put(
        self,
        objects: Iterable[Any],
        *,
        retain_keys: Iterable[str] = (),
        release_keys: Iterable[str] = (),
    ) -> None:
        """Store pages. Pages without room are missing later."""
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


class RowTable:
    """Rows by position: one page of rows for each KV page in the engine's memory.

    Not thread-safe. The memory is claimed from the system as it fills.

    Args:
        places: pages in the engine's memory.
        page_tokens: tokens of a page.
        row_shape: the shape of one token's row, layers and top_k.
    """

    def __init__(
        self, places: int, page_tokens: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.page_tokens = page_tokens
        self._rows = np.empty((places, page_tokens, *row_shape), dtype)
        self._known = np.zeros((places, page_tokens), np.bool_)
        self._missing = np.iinfo(dtype).max  # in every slot, as in `CapturedPages`

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page's rows."""
        return int(self._rows[0].nbytes)

    def write(self, places: Sequence[int], start: int, rows: np.ndarray) -> None:
        """Store the rows of tokens from `start` on. `places` are those of all pages in order."""
        at = self._at(places, start, start + len(rows))
        self._rows[at], self._known[at] = rows, True

    def read(self, places: Sequence[int], start: int, stop: int) -> np.ndarray:
        """Return a copy of the rows of tokens. Unknown rows have the largest number."""
        at = self._at(places, start, stop)
        rows = np.array(self._rows[at])
        rows[~self._known[at]] = self._missing
        return rows

    def page(self, place: int) -> bytes | None:
        """Return the rows of a page, or None if no row is known."""
        is_empty = not self._known[place].any()
        return None if is_empty else self.read([place], 0, self.page_tokens).tobytes()

    def put(self, place: int, page: bytes | None) -> None:
        """Set the rows that `page` returned. None makes all rows of the page missing."""
        self.empty([place])
        if page is not None:
            rows = np.frombuffer(page, self._rows.dtype).reshape(self._rows[place].shape)
            missing = (rows == self._missing).reshape(self.page_tokens, -1).all(axis=1)
            self._rows[place], self._known[place] = rows, ~missing

    def fill(self, place: int, page: bytes | None) -> None:
        """Set only the rows that are missing, given a result of `page`."""
        rows, known = self._rows[place].copy(), self._known[place].copy()
        self.put(place, page)
        self._rows[place, known], self._known[place, known] = rows[known], True

    def copy(self, source: int, target: int) -> None:
        """Copy the rows of one place to another."""
        self._rows[target], self._known[target] = self._rows[source], self._known[source]

    def empty(self, places: Sequence[int]) -> None:
        """Make all rows of pages missing."""
        self._known[list(places)] = False

    def is_whole(self, place: int) -> bool:
        return bool(self._known[place].all())

    def _at(self, places: Sequence[int], start: int, stop: int) -> tuple[Any, Any]:
        tokens = self.page_tokens
        if stop - start == 1:
            return places[start // tokens], slice(start % tokens, start % tokens + 1)
        page, inside = np.divmod(np.arange(start, stop), tokens)
        first = start // tokens
        return np.array(places[first : -(-stop // tokens)], np.int64)[page - first], inside
