"""Storages, which are the memory of tensors, and host memory that keeps their bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, UntypedStorage

__all__ = ["HostBuffer", "bytes_of", "plain_tensors"]


class HostBuffer:
    """Host memory that only grows: equal chunks with one range of addresses. Local.

    Args:
        chunk_bytes: the size of a chunk. A power of two wastes no memory, because torch rounds each
            pinned allocation up to one.
        pin: page-lock the memory, so that copies run at full speed.
    """

    def __init__(self, chunk_bytes: int, *, pin: bool) -> None:
        self._chunk_bytes, self._pin = chunk_bytes, pin
        self._chunks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return self._chunk_bytes * len(self._chunks)

    def reserve(self, num_bytes: int) -> None:
        """Grow to at least `num_bytes`. Bytes that were written stay."""
        while self.num_bytes < num_bytes:
            size, pin = self._chunk_bytes, self._pin
            chunk = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
            self._chunks.append(chunk)

    def write(self, start: int, source: Tensor) -> None:
        """Start a copy from the device, on its current stream."""
        for host, device in self._pairs(start, source):
            host.copy_(device, non_blocking=True)

    def read(self, start: int, target: Tensor) -> None:
        """Start a copy to the device, on its current stream."""
        for host, device in self._pairs(start, target):
            device.copy_(host, non_blocking=True)

    def _pairs(self, start: int, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        while done < x.numel():
            index, at = divmod(start + done, self._chunk_bytes)
            size = min(self._chunk_bytes - at, x.numel() - done)
            yield self._chunks[index][at : at + size], x[done : done + size]
            done += size


def plain_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with own memory inside a DTensor or other wrapper, by name. Local.

    A plain tensor yields itself, named "".
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield "", tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        # A DTensor also lists its mesh.
        if isinstance(inner := getattr(tensor, name), Tensor):
            yield from ((f".{name}{part}", x) for part, x in plain_tensors(inner))


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a tensor that aliases it. Local."""
    x = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return x.set_(storage, 0, (storage.nbytes(),), (1,))
