"""What a store promises, as a dictionary of clones."""

from __future__ import annotations

from collections.abc import Mapping

from .page import PageKey

__all__ = ["ReferenceStore"]


class ReferenceStore:
    """Unbounded, never forgets, never fails.

    A real store may answer "miss" where this one has a page; any page it does return
    is this one's page.
    """

    def __init__(self) -> None:
        self._pages: dict[PageKey, tuple[bytes, dict[str, bytes]]] = {}

    def save(self, key: PageKey, page: bytes, attachments: Mapping[str, bytes]) -> None:
        self._pages[key] = (bytes(page), dict(attachments))

    def load(self, key: PageKey) -> tuple[bytes, dict[str, bytes]] | None:
        return self._pages.get(key)

    def clear(self) -> None:
        self._pages.clear()
