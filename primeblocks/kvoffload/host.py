"""Pages in host memory: one slab, cut into equal slots."""

from __future__ import annotations

import numpy as np

from ..errors import CapacityError, PlanError
from .page import PageKey

__all__ = ["HostTier"]


class HostTier:
    """A pool of equal pages in one allocation.

    The slab is reserved once; saving and dropping pages never allocate page memory. The operating
    system hands out its memory when a slot is first written.

    Args:
        capacity_bytes: size of the slab; rounded down to whole slots.
        page_bytes: bytes of a page.
        attachment_bytes: room beside each page for its packed attachments.

    Raises:
        PlanError: not even one page fits.
    """

    name = "host"

    def __init__(self, *, capacity_bytes: int, page_bytes: int, attachment_bytes: int = 0) -> None:
        slot_bytes = page_bytes + attachment_bytes
        if page_bytes <= 0 or attachment_bytes < 0 or capacity_bytes < slot_bytes:
            raise PlanError(
                f"a host tier of {capacity_bytes} bytes does not hold one page of {page_bytes} "
                f"bytes with {attachment_bytes} bytes of attachments"
            )
        self.page_bytes = page_bytes
        self.attachment_bytes = attachment_bytes
        self.capacity_pages = capacity_bytes // slot_bytes
        self._slab = np.empty((self.capacity_pages, slot_bytes), dtype=np.uint8)
        self._free = list(range(self.capacity_pages - 1, -1, -1))
        self._slots: dict[PageKey, tuple[int, int, bytes]] = {}

    def put(self, key: PageKey, content: np.ndarray, digest: bytes) -> None:
        """Copy a page and its attachments into a slot. Local.

        Raises:
            CapacityError: all slots are taken; nothing was changed.
        """
        held = self._slots.get(key)
        if held is None and not self._free:
            raise CapacityError(f"all {self.capacity_pages} slots of the host tier are taken")
        slot = held[0] if held is not None else self._free.pop()
        self._slab[slot, : content.nbytes] = content
        self._slots[key] = (slot, content.nbytes, digest)

    def get(self, key: PageKey, *, into: np.ndarray) -> tuple[int, bytes] | None:
        """Copy a page out: its length and the digest it was saved with, or None. Local."""
        held = self._slots.get(key)
        if held is None:
            return None
        slot, length, digest = held
        into[:length] = self._slab[slot, :length]
        return length, digest

    def drop(self, key: PageKey) -> None:
        """Forget a page; unknown keys are ignored."""
        held = self._slots.pop(key, None)
        if held is not None:
            self._free.append(held[0])

    def keys(self) -> list[PageKey]:
        """All keys, in the order in which they were saved."""
        return list(self._slots)

    def close(self) -> None:
        """Release the slab."""
        self._slots.clear()
        self._free.clear()
        self._slab = np.empty((0, 0), dtype=np.uint8)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)
