"""`HostTier`: pages in host memory, as equal frames of one slab."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
import torch

from ..errors import CapacityError, UnsupportedError, UsageError
from .page import frames_of

__all__ = ["HostTier"]


class HostTier:
    """A pool of frames of equal size, in one allocation (the slab).

    The operating system provides memory when a frame is first written, unless the pool is pinned.

    Args:
        capacity_bytes: the size of the slab, rounded down to whole frames. A frame has the size of
            a page and its attachments, rounded up to a multiple of 4096 bytes.
        page_bytes: the bytes of a page.
        attachment_bytes: the bytes next to each page, for its packed attachments.
        pinned: whether to lock the slab in memory, for direct copies from and to a CUDA device.

    Raises:
        PlanError: `capacity_bytes` is too small for one page.
        UnsupportedError: `pinned` is True on a machine without a CUDA device.
        CapacityError: the operating system refuses to reserve the slab, or CUDA refuses to pin the
            slab.
    """

    name = "host"

    def __init__(
        self,
        *,
        capacity_bytes: int,
        page_bytes: int,
        attachment_bytes: int = 0,
        pinned: bool | int = False,  # int, so that `**sizes` of whole numbers fits
    ) -> None:
        self.frame_bytes, self.capacity_pages = frames_of(
            self.name,
            capacity_bytes=capacity_bytes,
            page_bytes=page_bytes,
            attachment_bytes=attachment_bytes,
        )
        self.page_bytes = page_bytes
        self.attachment_bytes = attachment_bytes
        self.pinned = pinned
        if pinned and not torch.cuda.is_available():
            raise UnsupportedError("pinned=True needs a CUDA device. Leave out pinned= on the CPU.")
        self._slab = _reserve(self.capacity_pages * self.frame_bytes)
        self._pages = torch.from_numpy(self._slab).view(-1, self.frame_bytes)[:, :page_bytes]
        self._claimed = Lock()
        if pinned:
            _cuda("cudaHostRegister", self._slab.ctypes.data, self._slab.nbytes, 0)

    def claim(self) -> None:
        """Claim the pool for one store. Raises UsageError if another store has claimed the pool."""
        if not self._claimed.acquire(blocking=False):
            raise UsageError(
                "this HostTier belongs to another store. Make one HostTier for each store."
            )

    def frame(self, number: int) -> np.ndarray:
        """Return the bytes of a frame, as a view aligned to 4096 bytes."""
        return self._slab[number * self.frame_bytes : (number + 1) * self.frame_bytes]

    def pages(self, frames: Sequence[int]) -> list[torch.Tensor]:
        """Return the bytes of the pages in `frames`.

        Adjacent frames cost only one slice operation.
        """
        pages: list[torch.Tensor] = []
        start = 0
        while start < len(frames):
            stop, first = start + 1, frames[start]
            while stop < len(frames) and frames[stop] == first + stop - start:
                stop += 1
            pages += self._pages[first : first + stop - start].unbind()
            start = stop
        return pages

    def close(self) -> None:
        """Release the slab. Its memory is freed with its last view. A second call does nothing."""
        if self.pinned and self._slab.nbytes:
            _cuda("cudaHostUnregister", self._slab.ctypes.data)
        self._slab = np.empty(0, dtype=np.uint8)
        self._pages = torch.empty(0, dtype=torch.uint8)


def _reserve(size: int) -> np.ndarray:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            f"cannot reserve {size} bytes of host memory: {error}. Lower capacity_bytes."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _cuda(call: str, *arguments: Any) -> None:
    code = getattr(torch.cuda.cudart(), call)(*arguments)
    if int(code) != 0:
        with suppress(RuntimeError):  # CUDA repeats the error at the next launch, whatever it is.
            torch.ones(1, device="cuda")
        raise CapacityError(
            f"{call} refused to pin the host tier: error {int(code)}. Lower capacity_bytes, or use "
            "pinned=False."
        )
