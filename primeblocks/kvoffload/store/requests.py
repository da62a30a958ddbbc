"""Requests of a store's callers, checked and ready for its catalogue."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import PlanError, ShapeError, UnsupportedError, UsageError
from ..host import HostTier
from ..page import PageKey, pack_attachments
from ..tier import Loaded, Saved, Tier
from .moves import LoadRequest, SaveRequest
from .pending import Batch

__all__ = [
    "Parts",
    "in_order",
    "load_requests",
    "page_parts",
    "same_length",
    "save_requests",
    "users_of",
]

Part = Tensor | np.ndarray  # an array where it is read-only
Parts = Part | list[Part]


def save_requests(
    batch: Batch[Saved],
    keys: Sequence[PageKey],
    pages: Sequence[Any],
    attachments: Sequence[Mapping[str, bytes] | None],
    *,
    host: HostTier,
    rollout: Hashable,
) -> list[SaveRequest]:
    """Make one save request for each page.

    Raises:
        ShapeError: a page or its packed attachments have the wrong size.
        UnsupportedError: a page is not in host memory.
        UsageError: a key is no `PageKey`, or the rollout's name is not hashable.
    """
    users = users_of(rollout)
    _refer(batch, keys, pages, page_bytes=host.page_bytes, writable=False)
    for index, named in enumerate(attachments):
        if named:
            extra = batch.extras[index] = pack_attachments(named)
            if len(extra) > (room := host.attachment_bytes):
                raise ShapeError(
                    f"the packed attachments have {len(extra)} bytes; the tiers keep {room}. "
                    f"Make them with attachment_bytes={len(extra)} or more."
                )
    return [
        SaveRequest(key, host.page_bytes + len(batch.extras.get(index, b"")), users, batch, index)
        for index, key in enumerate(keys)
    ]


def load_requests(
    batch: Batch[Loaded],
    keys: Sequence[PageKey],
    into: Sequence[Any],
    *,
    host: HostTier,
    rollout: Hashable,
) -> list[LoadRequest]:
    """Make one load request for each page.

    Raises:
        ShapeError: a buffer has the wrong size or is read-only.
        UnsupportedError: a buffer is not in host memory.
        UsageError: a key is no `PageKey`, or the rollout's name is not hashable.
    """
    users = users_of(rollout)
    _refer(batch, keys, into, page_bytes=host.page_bytes, writable=True)
    return [LoadRequest(key, users, batch, index) for index, key in enumerate(keys)]


def _refer(
    batch: Batch[Any],
    keys: Sequence[PageKey],
    pages: Sequence[Any],
    *,
    page_bytes: int,
    writable: bool,
) -> None:
    for key in keys:
        if not isinstance(key, PageKey):
            raise UsageError(f"a page is named by a PageKey; got {key!r}")
    batch.parts = [page_parts(page, page_bytes=page_bytes, writable=writable) for page in pages]
    batch.fences = {
        part.device: torch.cuda.current_stream(part.device).record_event()
        for parts in batch.parts
        for part in (parts if isinstance(parts, list) else (parts,))
        if isinstance(part, Tensor) and part.is_cuda
    }


def page_parts(page: Any, *, page_bytes: int, writable: bool) -> Parts:
    """Refer to the bytes of a page, without a copy.

    Args:
        page: a contiguous tensor, array or buffer, or a list or tuple of them: the pieces of a page
            that is not contiguous, such as one for each layer.
        writable: whether they are to be written to.

    Raises:
        ShapeError: wrong number of bytes, not contiguous, or read-only where `writable`.
        UnsupportedError: a tensor that is neither in host memory nor on a CUDA device.
    """
    parts: Parts
    if isinstance(page, list | tuple):
        parts = [each for part in page if (each := _bytes_of(part, writable=writable)).nbytes]
        size = sum(part.nbytes for part in parts)
    else:
        parts = _bytes_of(page, writable=writable)
        size = parts.nbytes
    if size != page_bytes:
        raise ShapeError(f"a page of this store has {page_bytes} bytes; got {size}")
    return parts


def _bytes_of(part: Any, *, writable: bool) -> Part:
    if isinstance(part, Tensor):
        if not (part.is_cpu or part.is_cuda):
            raise UnsupportedError(
                f"pages lie in host memory or on CUDA devices; got a tensor on {part.device}. "
                "Copy it with .cpu(), or let the engine's own worker copy."
            )
        if not part.is_contiguous():
            raise ShapeError(f"a page must be contiguous; got strides {part.stride()}")
        if part.dtype is torch.uint8 and part.stride() == (1,):
            return part
        return part.detach().as_strided((part.numel(),), (1,)).view(torch.uint8)
    raw = memoryview(part)
    if not raw.c_contiguous:
        raise ShapeError(f"a page must be contiguous; got strides {raw.strides}")
    if writable and raw.readonly:
        raise ShapeError("a page is loaded into a writable buffer; got a read-only one")
    if raw.readonly or not raw.nbytes:  # torch refers to neither
        return np.frombuffer(raw, dtype=np.uint8)
    return torch.frombuffer(raw, dtype=torch.uint8)


def users_of(*names: Hashable) -> tuple[Hashable, ...]:
    """Return the names that are not None; raise `UsageError` for one that is not hashable."""
    for name in names:
        try:
            hash(name)
        except TypeError as error:
            raise UsageError(
                f"rollouts, and what they wait for, have names that can be hashed, such as text; "
                f"got {name!r}"
            ) from error
    return tuple(name for name in names if name is not None)


def same_length(**sequences: Sequence[Any]) -> None:
    """Raise `ShapeError` unless a batch has one of each for every page."""
    lengths = {name: len(each) for name, each in sequences.items()}
    if len(set(lengths.values())) != 1:
        raise ShapeError(f"a batch has one of each for every page; got {lengths}")


def in_order(tiers: Sequence[HostTier | Tier]) -> tuple[HostTier, list[Tier]]:
    """Split tiers into host memory and those below it.

    Raises:
        UnsupportedError: no host tier in front, or a tier below one that others write to.
        PlanError: the tiers differ in their page or attachment size.
    """
    names = [tier.name for tier in tiers]
    if not tiers or not isinstance(tiers[0], HostTier):
        raise UnsupportedError(
            f"the first tier must be a HostTier; got {names}. Put HostTier(...) in front."
        )
    host = tiers[0]
    below = [tier for tier in tiers[1:] if not isinstance(tier, HostTier)]
    if len(below) != len(tiers) - 1 or len(set(names)) != len(names):
        raise UnsupportedError(f"tiers need different names and one host tier; got {names}")
    if any(tier.shared for tier in below[:-1]):
        raise UnsupportedError(f"a tier that others write to must be the last; got {names}")
    sizes = {(tier.page_bytes, tier.attachment_bytes) for tier in tiers}
    if len(sizes) != 1:
        raise PlanError(f"tiers with different (page, attachment) bytes: {sorted(sizes)}")
    return host, below
