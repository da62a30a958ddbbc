"""The reference of a store: a dictionary of copies."""

from __future__ import annotations

from collections.abc import Mapping

from .page import PageKey

__all__ = ["ReferenceStore"]


class ReferenceStore:
    """An unbounded store that never forgets and never fails.

    A real store may miss a page that this store has. Any page that a real store returns equals the
    page of this store.
    """

    def __init__(self) -> None:
        self._pages: dict[PageKey, tuple[bytes, dict[str, bytes]]] = {}

    def save(self, key: PageKey, page: bytes, attachments: Mapping[str, bytes]) -> None:
        self._pages[key] = (bytes(page), dict(attachments))

    def load(self, key: PageKey) -> tuple[bytes, dict[str, bytes]] | None:
        return self._pages.get(key)

    def clear(self) -> None:
        self._pages.clear()
