"""Buffers that a caller hands over as a page, one or several in a row, and copies of many pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ShapeError, UnsupportedError
from .pending import Batch

__all__ = ["Buffer", "copy_pages", "page_buffer"]

Part = Tensor | np.ndarray  # arrays where they are read-only
_Fences = dict[torch.device, torch.cuda.Event]

# Above it torch would start threads of its own for one copy: it counts elements, at most 32,768.
_SERIAL_BYTES = 32 << 10
_WIDE_BYTES = 64 << 10  # larger ones are faster one by one


@dataclass(slots=True, eq=False)
class Buffer:
    """A page of a caller: its bytes where they lie, in host memory or on CUDA devices.

    Args:
        batch: takes the result of the page, under `index`.
        extra: packed attachments, which follow the page in its frame.
        fences: a copy waits for this work, which was given to the caller's streams before.
    """

    batch: Batch[Any]
    index: int
    parts: Sequence[Part]
    extra: bytes = b""
    fences: _Fences | None = None


def copy_pages(buffers: Sequence[Buffer], rooms: Sequence[Tensor], *, out: bool) -> None:
    """Copy pages into rooms of host memory, or `out` of them: small ones together.

    A copy that is one call lets go of the interpreter once. With a call for each page, the thread
    would wait for it after each.
    """
    parts: list[Tensor] = []
    spaces: list[Tensor] = []
    streams: dict[torch.device, torch.cuda.Stream] = {}
    try:
        for buffer, room in zip(buffers, rooms, strict=True):
            for device, fence in (buffer.fences or {}).items():
                if device not in streams:
                    streams[device] = torch.cuda.Stream(device)
                streams[device].wait_event(fence)
            at = 0
            for part in buffer.parts:
                size = part.nbytes
                space = room if size == room.nbytes else room[at : at + size]
                at += size
                if isinstance(part, np.ndarray):
                    np.copyto(space.numpy(), part)
                elif part.is_cuda:
                    with torch.cuda.stream(streams[part.device]):
                        _copy(part, space, out=out)
                elif size <= _SERIAL_BYTES:
                    parts.append(part)
                    spaces.append(space)
                elif size <= _WIDE_BYTES and size % 8 == 0:
                    parts.append(part.view(torch.int64))
                    spaces.append(space.view(torch.int64))
                else:  # in one go faster than with torch, which does not copy as memcpy does
                    pair = part.numpy(), space.numpy()
                    np.copyto(*(pair if out else pair[::-1]))
        if parts:
            torch._foreach_copy_(*((parts, spaces) if out else (spaces, parts)))
    finally:
        for stream in streams.values():
            stream.synchronize()


def _copy(part: Tensor, space: Tensor, *, out: bool) -> None:
    target, source = (part, space) if out else (space, part)
    target.copy_(source, non_blocking=True)


def page_buffer(
    batch: Batch[Any], index: int, page: Any, *, page_bytes: int, writable: bool
) -> Buffer:
    """Refer to the bytes of a page, without a copy.

    Args:
        page: a contiguous tensor, array or buffer, or a list or tuple of them: the pieces of a page
            that is not contiguous, such as one for each layer.
        writable: whether they are to be written to.

    Raises:
        ShapeError: wrong number of bytes, not contiguous, or read-only where `writable`.
        UnsupportedError: a tensor that is neither in host memory nor on a CUDA device.
    """
    if isinstance(page, list | tuple):
        parts = [each for part in page if (each := _bytes_of(part, writable=writable)).nbytes]
    else:
        parts = [_bytes_of(page, writable=writable)]
    size = sum([part.nbytes for part in parts])
    if size != page_bytes:
        raise ShapeError(f"a page of this store has {page_bytes} bytes; got {size}")
    devices = {part.device for part in parts if isinstance(part, Tensor) and part.is_cuda}
    fences = {each: torch.cuda.current_stream(each).record_event() for each in devices}
    return Buffer(batch, index, parts, fences=fences or None)


def _bytes_of(part: Any, *, writable: bool) -> Part:
    if isinstance(part, Tensor):
        if not (part.is_cpu or part.is_cuda):
            raise UnsupportedError(
                f"pages lie in host memory or on CUDA devices; got a tensor on {part.device}. "
                "Copy it with .cpu(), or let the engine's own worker copy."
            )
        if not part.is_contiguous():
            raise ShapeError(f"a page must be contiguous; got strides {part.stride()}")
        if part.dtype is torch.uint8 and part.dim() == 1:
            return part
        return part.detach().reshape(-1).view(torch.uint8)
    raw = memoryview(part)
    if not raw.c_contiguous:
        raise ShapeError(f"a page must be contiguous; got strides {raw.strides}")
    if writable and raw.readonly:
        raise ShapeError("a page is loaded into a writable buffer; got a read-only one")
    if raw.readonly or not raw.nbytes:  # torch refers to neither
        return np.frombuffer(raw, dtype=np.uint8)
    return torch.frombuffer(raw, dtype=torch.uint8)
