"""The protocol of a tier below host memory, the values that a store returns, and host memory."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..errors import CapacityError, PrimeblocksError, UnsupportedError, UsageError
from .page import PageKey, frames_of

__all__ = ["Found", "HostTier", "Loaded", "Record", "Saved", "Tier", "TierStatistics"]

# The most that one call pins. vLLM 0.32 has the same limit, because drivers may refuse more.
_PIN_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class Record:
    """A page that is written to a tier.

    Args:
        content: the bytes of the page, then its packed attachments.
        digest: the `checksum` of key and content. The tier stores the digest, but does not
            check it.
        frame: the whole frame that begins with `content`, for I/O in units of 4096 bytes. Its
            address is a multiple of 4096.
    """

    key: PageKey
    content: np.ndarray
    digest: bytes
    frame: np.ndarray


class Found(NamedTuple):
    """A page that a tier returned: the length of its content, and its stored digest."""

    length: int
    digest: bytes


class Tier(Protocol):
    """A place for pages below host memory, such as a disk or a store on the network.

    The store's constructor calls `keys` in its own thread. One other thread then calls all methods
    except `holds`, which any thread may call. If `put` or `get` fails for one page, the page's
    entry in the result is the error. The call still serves the other pages of the batch.
    """

    @property
    def name(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def attachment_bytes(self) -> int: ...
    @property
    def capacity_pages(self) -> int:
        """The number of pages that fit before the store must evict. Ignored if `shared`."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other processes also write to the tier.

        The store does not evict from a shared tier.
        """
        ...

    def put(self, records: Sequence[Record]) -> list[PrimeblocksError | OSError | None]:
        """Write pages, and replace earlier pages with equal keys. Return None or an error per page.

        A shared tier may keep the earlier page.
        """
        ...

    def get(
        self, keys: Sequence[PageKey], *, into: Sequence[np.ndarray]
    ) -> list[Found | PrimeblocksError | OSError | None]:
        """Read pages into whole, aligned frames. In the result, None means a miss."""
        ...

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Remove pages, so that a store that opens the tier later cannot find these pages.

        Unknown keys are ignored.
        """
        ...

    def clear(self) -> None:
        """Remove every page, so that a store that opens the tier later finds no pages."""
        ...

    def flush(self) -> None:
        """Make all pages written so far survive a power cut, as far as the tier can."""
        ...

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return for each page whether `get` may find it."""
        ...

    def keys(self) -> list[PageKey]:
        """Return all keys, oldest first, or an empty list for a shared tier."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Saved:
    """The result of a save.

    Args:
        stored: whether the store has the page. A store may decline any page.
        reason: why the store declined the page.
    """

    stored: bool
    reason: str = ""


@dataclass(frozen=True)
class Loaded:
    """The result of a load. `bool(loaded)` is True for a found page, and False for a miss.

    Args:
        tier: the name of the tier that had the page, or None after a miss. A miss leaves `into`
            unchanged.
        attachments: the attachments saved with the page.
    """

    tier: str | None
    attachments: Mapping[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.tier is not None


@dataclass(frozen=True)
class TierStatistics:
    """Counts since the store was made.

    Args:
        hits: loads that this tier served.
        misses: loads for which this tier had no usable page.
        stores: pages written, by saves, demotions and promotions.
        evictions: pages that were evicted to make room.
        checksum_failures: pages that the store dropped, because their bytes did not match their
            checksum or could not be read in full.
        failures: reads and writes that the tier refused, for example on a full disk.
        skipped: pages not written because the tier had refused other pages or did not keep up.
        bytes_written: the bytes of pages and attachments that `stores` counts.
        bytes_read: the bytes of pages and attachments that `hits` counts.
        pages: pages in the tier now.
        capacity_pages: pages that fit, or 0 if the tier is shared.
    """

    hits: int
    misses: int
    stores: int
    evictions: int
    checksum_failures: int
    failures: int
    skipped: int
    bytes_written: int
    bytes_read: int
    pages: int
    capacity_pages: int


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
        self._pins: list[int] = []  # The addresses of the chunks that CUDA has pinned.
        if pinned:
            self._pin()

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
        for _, run in groupby(enumerate(frames), lambda each: each[1] - each[0]):
            adjacent = [frame for _, frame in run]
            pages += self._pages[adjacent[0] : adjacent[-1] + 1].unbind()
        return pages

    def close(self) -> None:
        """Release the slab. Its memory is freed with its last view. A second call does nothing."""
        while self._pins:
            _cuda("cudaHostUnregister", self._pins.pop())
        self._slab = np.empty(0, dtype=np.uint8)
        self._pages = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        # Chunks have whole frames, so that no copy of a page touches two chunks.
        step = max(1, _PIN_BYTES // self.frame_bytes) * self.frame_bytes
        try:
            for start in range(0, self._slab.nbytes, step):
                chunk = self._slab[start : start + step]
                _cuda("cudaHostRegister", chunk.ctypes.data, chunk.nbytes, 0)
                self._pins.append(chunk.ctypes.data)
        except CapacityError:
            self.close()
            raise


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
