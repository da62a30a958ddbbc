"""Buffers that a caller hands over as a page: one, or several in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import ShapeError, UnsupportedError

__all__ = ["Pieces", "page_pieces"]


class Pieces:
    """The bytes of a page where they lie: in host memory or on CUDA devices.

    A copy waits for work given to the caller's current streams before this object was made.
    """

    def __init__(self, parts: Sequence[np.ndarray | torch.Tensor]) -> None:
        self._parts = parts
        self._fences = {
            part.device: torch.cuda.current_stream(part.device).record_event()
            for part in parts
            if isinstance(part, torch.Tensor)
        }

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def gather(self, frame: np.ndarray) -> None:
        """Copy the pieces into the frame, one after the other."""
        self._copy(frame, out=False)

    def scatter(self, frame: np.ndarray) -> None:
        """Copy the frame into the pieces, the inverse of `gather`."""
        self._copy(frame, out=True)

    def _copy(self, frame: np.ndarray, *, out: bool) -> None:
        streams = {device: torch.cuda.Stream(device) for device in self._fences}
        try:
            self._queue(frame, streams, out=out)
        finally:
            for stream in streams.values():
                stream.synchronize()

    def _queue(
        self, frame: np.ndarray, streams: dict[torch.device, torch.cuda.Stream], *, out: bool
    ) -> None:
        at = 0
        for part in self._parts:
            room = frame[at : at + part.nbytes]
            at += part.nbytes
            if isinstance(part, np.ndarray):
                # Copies as np.copyto does, but faster: vector instructions in place of `rep movsb`.
                np.positive(*((room, part) if out else (part, room)))
                continue
            stream = streams[part.device]
            stream.wait_event(self._fences[part.device])
            with torch.cuda.stream(stream):
                host = torch.from_numpy(room)
                target, source = (part, host) if out else (host, part)
                target.copy_(source, non_blocking=True)


def page_pieces(page: Any, *, page_bytes: int, writable: bool) -> Pieces:
    """Refer to the bytes of a page, without a copy.

    Args:
        page: a contiguous tensor, array or buffer, or a list or tuple of them: the pieces of a page
            that is not contiguous, such as one for each layer.
        writable: whether they are to be written to.

    Raises:
        ShapeError: wrong number of bytes, not contiguous, or read-only where `writable`.
        UnsupportedError: a tensor that is neither in host memory nor on a CUDA device.
    """
    parts = page if isinstance(page, list | tuple) else [page]
    pieces = Pieces([_bytes_of(part, writable=writable) for part in parts])
    if pieces.nbytes != page_bytes:
        raise ShapeError(f"a page of this store has {page_bytes} bytes; got {pieces.nbytes}")
    return pieces


def _bytes_of(part: Any, *, writable: bool) -> np.ndarray | torch.Tensor:
    if isinstance(part, torch.Tensor):
        if part.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"pages lie in host memory or on CUDA devices; got a tensor on {part.device}. "
                "Copy it with .cpu(), or let the engine's own worker copy."
            )
        if not part.is_contiguous():
            raise ShapeError(f"a page must be contiguous; got strides {part.stride()}")
        flat = part.detach().as_strided((part.numel(),), (1,)).view(torch.uint8)
        return flat if flat.is_cuda else flat.numpy()
    raw = memoryview(part)
    if not raw.c_contiguous:
        raise ShapeError(f"a page must be contiguous; got strides {raw.strides}")
    if writable and raw.readonly:
        raise ShapeError("a page is loaded into a writable buffer; got a read-only one")
    return np.frombuffer(raw, dtype=np.uint8)
