"""The carrier of handles: buffers of one process that others on the host open where they lie.

On the CPU a buffer is anonymous shared memory, found through /proc; torch's own handles of CPU
tensors are each for one reader, which opens it once. On a GPU it is CUDA IPC through torch's
handles: that half has run on one GPU, between two processes.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...errors import CapacityError, CorruptionError, UnsupportedError
from .blobs import allocate, mapped, open_of
from .packed import OpenedSpans, Shared, Span, noted

__all__ = ["HandleCarrier"]

_TURNS = 2
_DEVICE = 6  # Of the arguments of rebuild_cuda_tensor: what follows it is bytes and numbers.


class HandleCarrier:
    """A `Carrier` whose reader gets the bytes where they lie. Each buffer is opened once.

    On a GPU, close engines' ends before the trainer's: their memory is the trainer's.

    Args:
        device: the device of this process's buffers. Engines follow.

    Raises:
        UnsupportedError: the device cannot be used.
    """

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        if self._device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"no handles of memory on {device}; pass a CUDA device, or the CPU"
            )
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(f"{device}, and torch sees no GPU. Pass device='cpu'.")
        self._ends: dict[str, weakref.finalize[..., HandleCarrier]] = {}
        self._opened: dict[str, UInt8[Tensor, " bytes"]] = {}

    def spec(self) -> dict[str, Any]:
        return {"kind": "handles"}

    def make(self, size_bytes: int) -> Shared:
        token = secrets.token_hex(8)
        note: dict[str, Any] = {"token": token, "bytes": size_bytes}
        try:
            if self._device.type == "cuda":
                buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
                note |= {"uuid": _uuid(buffer.device), "cuda": _cuda_handle(buffer)}
                return Shared(buffer, note)
            fd = allocate(_name(token), size_bytes)
            # It ends with this process, or with this object.
            self._ends[token] = weakref.finalize(self, os.close, fd)
            note |= {"pid": os.getpid(), "fd": fd}
            return Shared(mapped(fd, size_bytes, shared=True), note)
        except (OSError, torch.OutOfMemoryError) as error:
            self._end(token)
            raise CapacityError(
                f"no {size_bytes:,} bytes on {self._device} for packed weights: {error}. A trainer "
                "rank needs twice the bytes that it sends."
            ) from error

    def drop(self, shared: Shared) -> None:
        """Let nobody else open a buffer. On the CPU, readers that did keep its memory."""
        self._end(shared.note["token"])

    def fetch(self, spans: Sequence[Span], *, again: bool, deadline: float) -> OpenedSpans:
        notes = {_token(span.note): span.note for span in spans}
        opened = {}
        for token, note in notes.items():
            kept = self._opened.get(token)
            opened[token] = _opened(note) if kept is None else kept
        parts = [opened[_token(note)][start : start + size] for note, start, size in spans]
        if any(len(part) != span.bytes for part, span in zip(parts, spans, strict=True)):
            raise CorruptionError("a buffer is smaller than its note says")
        if again:
            self._keep(opened)
        gpus = {part.device for part in parts if part.device.type == "cuda"}

        def close() -> None:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)  # Copies out of the buffer may be on their way.

        return OpenedSpans(parts, False, close)

    def close(self) -> None:
        self._opened.clear()
        while self._ends:
            self._ends.popitem()[1]()

    def _end(self, token: str) -> None:
        end = self._ends.pop(token, None)
        if end is not None:
            end()

    def _keep(self, opened: Mapping[str, Tensor]) -> None:
        """Keep these open, and as many that were opened before: a rank's buffers take turns."""
        for token, buffer in opened.items():
            self._opened.pop(token, None)
            self._opened[token] = buffer
        while len(self._opened) > _TURNS * len(opened):
            del self._opened[next(iter(self._opened))]


def _token(note: Mapping[str, Any]) -> str:
    noted(note, "bytes")
    return str(note.get("token"))


def _opened(note: Mapping[str, Any]) -> UInt8[Tensor, " bytes"]:
    """Open the buffer of another process, shared. On the CPU, writing to it harms the writer only.

    Raises:
        TransferError: its process is gone, or closed it.
        UnsupportedError: it is on a GPU that this process does not see.
    """
    if "cuda" in note:
        return _open_cuda(note)
    fd = open_of(noted(note, "pid"), noted(note, "fd"), _name(_token(note)), os.O_RDONLY)
    try:
        if os.fstat(fd).st_size != note["bytes"]:  # Beyond its end is a SIGBUS.
            raise CorruptionError("a buffer has another size than its note says")
        return mapped(fd, note["bytes"], shared=False)
    finally:
        os.close(fd)


def _cuda_handle(buffer: Tensor) -> list[Any]:
    # No pickle: others may be able to write where a note lies.
    args = reduce_tensor(buffer)[1]
    return [arg.hex() if isinstance(arg, bytes) else arg for arg in args[_DEVICE + 1 :]]


def _open_cuda(note: Mapping[str, Any]) -> UInt8[Tensor, " bytes"]:
    seen = [_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if note["uuid"] not in seen:
        raise UnsupportedError(
            f"the weights are on GPU {note['uuid']}, this process sees {seen}. Make it visible, "
            "or use SharedMemoryTransport."
        )
    handle = [bytes.fromhex(arg) if isinstance(arg, str) else arg for arg in note["cuda"]]
    # Processes count the same GPUs differently.
    device = seen.index(note["uuid"])
    storage, shape = torch.storage.TypedStorage, torch.Size([note["bytes"]])
    what = (Tensor, shape, (1,), 0, storage, torch.uint8, device, *handle)
    opened = rebuild_cuda_tensor(*what)
    assert isinstance(opened, Tensor)
    return opened


def _name(token: str) -> str:
    return f"primeblocks-{token}"


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
