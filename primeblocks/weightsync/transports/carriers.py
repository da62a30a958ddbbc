"""Carriers of packed buffers, over handles of memory or over wires for one-sided reads.

A carrier makes the buffers of this process (`make`, `drop`), and fetches spans of the buffers of
other processes. With `again`, `fetch` keeps mappings or memory for a later fetch of the same
buffers or sizes. Without `again`, spans are in place or in host memory. `fetch` raises
TransferError if a process has ended or has dropped its buffer, and DeadlineError if the spans were
not fetched in time.

With a handle, other processes of the machine open a buffer in place. A CPU buffer is anonymous
shared memory, which they find through /proc. Torch's own handles of CPU tensors are not used,
because they serve only one reader. A GPU buffer is opened by CUDA IPC with torch's handles. CUDA
IPC ran on one GPU, between two processes. The modules `tcp_wire` and `adapters.nixl` define wires.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...errors import CapacityError, CorruptionError, TransferError, UnsupportedError
from ..marker import is_count
from .blobs import allocate, mapped, open_of

__all__ = [
    "ALIGN_BYTES",
    "Carrier",
    "HandleCarrier",
    "OpenedSpans",
    "Read",
    "Shared",
    "Span",
    "Wire",
    "WireCarrier",
    "indexed",
    "noted",
    "starts_of",
]

ALIGN_BYTES = 256  # Suits GPUs and network cards, and is a multiple of every element size.
_TURNS = 2
_DEVICE = 6  # The device's index in rebuild_cuda_tensor's arguments. Bytes and numbers follow.


class Shared(NamedTuple):
    """A buffer of this process, and the JSON-able note with which other processes find it."""

    buffer: UInt8[Tensor, " bytes"]
    note: Mapping[str, Any]


class Span(NamedTuple):
    """Bytes of a shared buffer of another process."""

    note: Mapping[str, Any]
    start: int
    bytes: int


class OpenedSpans(NamedTuple):
    """Fetched spans. If not `is_own`, they are in the writer's buffer, where they may change."""

    parts: Sequence[UInt8[Tensor, " bytes"]]
    is_own: bool
    close: Callable[[], object]


def noted(note: Mapping[str, Any], key: str) -> int:
    """Return a number from a note of another process, or raise CorruptionError."""
    value = note.get(key) if isinstance(note, Mapping) else None
    if is_count(value):
        return value
    raise CorruptionError(
        f"the note of a buffer cannot be read: {str(note)[:100]!r} has no {key!r}. Publish again."
    )


def starts_of(
    sizes: Mapping[int, int], *, align_bytes: int = ALIGN_BYTES
) -> tuple[dict[int, int], int]:
    """Return the start of each bucket in a buffer, and the bytes of the buffer. Pure."""
    starts, end = {}, 0
    for index, size in sizes.items():
        starts[index] = end
        end += -(-size // align_bytes) * align_bytes
    return starts, end


class HandleCarrier:
    """A carrier whose reader opens the buffers in place.

    A CPU buffer is opened once, and a GPU buffer once per version.
    """

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self._device = indexed(device)
        if self._device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"memory on {device} has no handles that other processes can open. Pass a CUDA "
                "device, or device='cpu'."
            )
        self._ends: dict[str, weakref.finalize[..., HandleCarrier]] = {}
        self._opened: dict[str, UInt8[Tensor, " bytes"]] = {}

    def spec(self) -> dict[str, Any]:
        return {"kind": "handles"}

    def make(self, size_bytes: int, *, device: str | None = None) -> Shared:
        where = self._device if device is None else torch.device(device)
        token = secrets.token_hex(8)
        note: dict[str, Any] = {"token": token, "bytes": size_bytes}
        try:
            if where.type == "cuda":
                buffer = torch.empty(size_bytes, dtype=torch.uint8, device=where)
                note |= {"uuid": _uuid(buffer.device), "cuda": _cuda_handle(buffer)}
                return Shared(buffer, note)
            fd = allocate(_name(token), size_bytes)
            # The memory ends with this process, or with this object.
            self._ends[token] = weakref.finalize(self, os.close, fd)
            note |= {"pid": os.getpid(), "fd": fd}
            return Shared(mapped(fd, size_bytes, shared=True), note)
        except (OSError, torch.OutOfMemoryError) as error:
            self._end(token)
            raise CapacityError(
                f"cannot allocate {size_bytes:,} bytes on {where} for packed weights: "
                f"{error}. Free memory, because a trainer rank needs twice the bytes that it "
                "sends."
            ) from error

    def drop(self, shared: Shared) -> None:
        self._end(shared.note["token"])

    def fetch(self, spans: Sequence[Span], *, again: bool, deadline: float) -> OpenedSpans:
        notes = {_token(span.note): span.note for span in spans}
        opened = {}
        for token, note in notes.items():
            kept = self._opened.get(token)
            opened[token] = _opened(note) if kept is None else kept
        parts = [opened[_token(note)][start : start + size] for note, start, size in spans]
        if any(len(part) != span.bytes for part, span in zip(parts, spans, strict=True)):
            raise CorruptionError("a buffer is smaller than its note says. Publish again.")
        if again:
            # A kept mapping would keep a GPU's memory after the trainer's process has ended.
            self._keep({token: opened[token] for token in notes if "cuda" not in notes[token]})
        gpus = {part.device for part in parts if part.device.type == "cuda"}

        def close() -> None:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)  # Copies from the buffer may still be running.

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
        """Keep these buffers open, and as many earlier ones, because a rank uses two in turn."""
        for token, buffer in opened.items():
            self._opened.pop(token, None)
            self._opened[token] = buffer
        while len(self._opened) > _TURNS * len(opened):
            del self._opened[next(iter(self._opened))]


class Read(NamedTuple):
    """Bytes of another process's buffer, and the part of a shared buffer that receives them."""

    note: Mapping[str, Any]
    start: int
    target: Tensor


class Wire(Protocol):
    """Reads the memory of other processes. Each process has a wire of its own.

    `TcpWire` and `adapters.nixl.NixlWire` are wires.
    """

    def spec(self) -> dict[str, Any]:
        """Return the arguments that open the reading end in another process. JSON-able."""
        ...

    def share(self, buffer: Tensor) -> dict[str, Any]:
        """Register a buffer.

        Return a JSON-able description that other processes need to read the buffer.
        """
        ...

    def unshare(self, buffer: Tensor) -> None:
        """Deregister a buffer. Later reads of the buffer are refused."""
        ...

    def read(self, reads: Sequence[Read], *, deadline: float) -> None:
        """Do all reads.

        Raises:
            TransferError: the other process has ended.
            DeadlineError: the reads were not done in time.
        """
        ...

    def close(self) -> None:
        """Release all buffers. Idempotent."""
        ...


class WireCarrier:
    """A carrier whose reader copies the spans into one registered buffer of its own."""

    def __init__(self, wire: Wire, *, device: torch.device | str = "cpu") -> None:
        self._wire, self._device = wire, indexed(device)
        self._spare: Tensor | None = None
        self._closed = False

    def spec(self) -> dict[str, Any]:
        return {"kind": "wire", "wire": self._wire.spec()}

    def make(self, size_bytes: int, *, device: str | None = None) -> Shared:
        where = self._device if device is None else torch.device(device)
        # At least 1 byte, because an empty buffer cannot be registered.
        buffer = torch.empty(max(1, size_bytes), dtype=torch.uint8, device=where)
        return Shared(buffer, self._wire.share(buffer))

    def drop(self, shared: Shared) -> None:
        self._wire.unshare(shared.buffer)

    def fetch(self, spans: Sequence[Span], *, again: bool, deadline: float) -> OpenedSpans:
        starts, size_bytes = starts_of({i: span.bytes for i, span in enumerate(spans)})
        buffer = None
        if again:  # Fetches without `again` may run at the same time.
            buffer, self._spare = self._spare, None
        if buffer is None or len(buffer) != max(1, size_bytes):
            self._give_back(buffer, again=False)
            buffer = self.make(size_bytes, device=None if again else "cpu").buffer
        parts = [buffer[starts[i] : starts[i] + span.bytes] for i, span in enumerate(spans)]
        reads = [Read(s.note, s.start, part) for s, part in zip(spans, parts, strict=True)]
        try:
            if again and self._device.type == "cuda":
                # Queued work may still use this memory, and a wire does not wait for streams.
                torch.cuda.synchronize(self._device)
            self._wire.read(reads, deadline=deadline)
        except BaseException:
            self._give_back(buffer, again=False)  # A read may still write to it.
            raise
        return OpenedSpans(parts, True, partial(self._give_back, buffer, again=again))

    def close(self) -> None:
        # The wire deregisters the buffers.
        self._closed, self._spare = True, None
        self._wire.close()

    def _give_back(self, buffer: Tensor | None, *, again: bool) -> None:
        if buffer is None or self._closed:
            return
        if again and self._spare is None:
            self._spare = buffer
        else:
            self._wire.unshare(buffer)


Carrier = HandleCarrier | WireCarrier


def indexed(device: torch.device | str) -> torch.device:
    """Return the device with its index. Buffers may be made in a thread that has device 0."""
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"got device={str(device)!r}, but torch sees no GPU. Pass device='cpu'."
        )
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _token(note: Mapping[str, Any]) -> str:
    noted(note, "bytes")
    return str(note.get("token"))


def _opened(note: Mapping[str, Any]) -> UInt8[Tensor, " bytes"]:
    """Open the buffer of another process. On the CPU, writes to it stay in this process."""
    if "cuda" in note:
        return _open_cuda(note)
    fd = open_of(noted(note, "pid"), noted(note, "fd"), _name(_token(note)), os.O_RDONLY)
    try:
        if os.fstat(fd).st_size != note["bytes"]:  # A read past the end causes SIGBUS.
            raise CorruptionError("a buffer has another size than its note says. Publish again.")
        return mapped(fd, note["bytes"], shared=False)
    finally:
        os.close(fd)


def _cuda_handle(buffer: Tensor) -> list[Any]:
    # Not pickled, because other processes may be able to change a note.
    args = reduce_tensor(buffer)[1]
    return [arg.hex() if isinstance(arg, bytes) else arg for arg in args[_DEVICE + 1 :]]


def _open_cuda(note: Mapping[str, Any]) -> UInt8[Tensor, " bytes"]:
    seen = [_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if note["uuid"] not in seen:
        raise UnsupportedError(
            f"the weights are on GPU {note['uuid']}, but this process sees {seen}. Make that GPU "
            "visible, or use SharedMemoryTransport."
        )
    handle = [bytes.fromhex(arg) if isinstance(arg, str) else arg for arg in note["cuda"]]
    # Processes count the same GPUs differently.
    device = seen.index(note["uuid"])
    storage, shape = torch.storage.TypedStorage, torch.Size([note["bytes"]])
    what = (Tensor, shape, (1,), 0, storage, torch.uint8, device, *handle)
    try:
        opened = rebuild_cuda_tensor(*what)
    except RuntimeError as error:
        raise TransferError(
            f"the trainer's buffer on GPU {note['uuid']} cannot be opened: {error}. Check that the "
            "trainer runs. If it uses expandable_segments, allow ptrace or switch them off."
        ) from error
    assert isinstance(opened, Tensor)
    return opened


def _name(token: str) -> str:
    return f"primeblocks-{token}"


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
