"""The digest of a bucket. Both sides compute it from the same bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash
from jaxtyping import UInt8
from torch import Tensor

__all__ = [
    "Digest",
    "as_buffer",
    "bucket_digest",
    "cast_and_digest",
    "crossing",
    "pool_of",
    "taken",
]

# XXH3-128: finds any accident, at the speed of memory. It does not defend against an attacker, who
# could write the commit as well as the weights.
Digest = xxhash.xxh3_128

# A chunk is cast, written and digested while in the cache. Smaller chunks cost more in calls than
# they save.
_CHUNK_BYTES = 1 << 19
# The bytes of each of two buffers of pinned memory, for copies from a device.
_PINNED_BYTES = 8 << 20

Bytes = UInt8[np.ndarray, " chunk"]
Parts = Iterator[tuple[Tensor, Tensor | None]]


def bucket_digest(pieces: Iterable[Tensor]) -> str:
    """Return the digest of a bucket's pieces, over their bytes in C order. Local: one pass."""
    digest = Digest()
    for piece in pieces:
        if piece.device.type == "cpu":
            digest.update(as_buffer(piece.contiguous()))
        else:
            for new, _ in taken(piece, piece.dtype, None, _CHUNK_BYTES):
                digest.update(new.data)
    return digest.hexdigest()


def cast_and_digest(
    sources: Sequence[Tensor], dtypes: Sequence[torch.dtype], into: Sequence[Tensor] | None
) -> str:
    """Copy tensors, each cast to its dtype, and return the digest of the copies. Local: one pass.

    Args:
        into: targets of the same shapes. With None, only the digest is computed.
    """
    digest = Digest()
    targets: Sequence[Tensor | None] = [None] * len(sources) if into is None else into
    for source, dtype, target in zip(sources, dtypes, targets, strict=True):
        for new, room in taken(source, dtype, target, _CHUNK_BYTES):
            if room is None:
                digest.update(new.data)
            else:  # So the copy reads and writes memory at once, and the digest reads the cache.
                np.copyto(room, new)
                digest.update(room.data)
    return digest.hexdigest()


def taken(
    source: Tensor, dtype: torch.dtype, target: Tensor | None, chunk_bytes: int
) -> Iterator[tuple[Bytes, Bytes | None]]:
    """Cast a tensor chunk by chunk, and yield the bytes of each chunk and the place of its copy.

    A chunk is valid until the next. If the place is on a device or not contiguous, this function
    makes the copy and yields None for the place. Bytes of a device cross the bus once, through
    pinned memory. A copy from a device to the same device does not cross the bus.
    """
    if _are_plain(source, dtype, target):
        new = np.asarray(as_buffer(source))
        room = None if target is None else np.asarray(as_buffer(target))
        for at in range(0, len(new), chunk_bytes):
            here = slice(at, at + chunk_bytes)
            yield new[here], None if room is None else room[here]
        return
    is_here = source.device.type == "cpu"
    size_bytes = chunk_bytes if is_here else _PINNED_BYTES
    parts = _cast(_chunks(source, target, dtype.itemsize, size_bytes), dtype)
    for plain, place in parts if is_here else crossing(parts, _pinned, _send):
        new = np.asarray(as_buffer(plain))
        if place is not None and place.is_contiguous():
            yield new, np.asarray(as_buffer(place))
            continue
        if place is not None:
            place.copy_(plain)
        yield new, None


def crossing(
    parts: Parts,
    allocate: Callable[[int], UInt8[Tensor, " bytes"]],
    send: Callable[[Tensor, Tensor], Callable[[], object]],
) -> Parts:
    """Yield parts on the host. A part is valid until the next part, which is copied meanwhile.

    Args:
        allocate: returns pinned memory of the given number of bytes.
        send: starts a copy into the first tensor from the second, and returns a function that
            waits for the end of the copy.
    """
    rooms: list[UInt8[Tensor, " bytes"]] = []
    under_way: deque[tuple[Tensor, Tensor | None, Callable[[], object]]] = deque()
    for turn, (cast, place) in enumerate(parts):
        if turn < 2:
            rooms.append(allocate(max(_PINNED_BYTES, cast.nbytes)))
        room = rooms[turn % 2][: cast.nbytes].view(cast.dtype).view(cast.shape)
        under_way.append((room, place, send(room, cast)))
        if len(under_way) == 2:
            yield _arrived(*under_way.popleft())
    while under_way:
        yield _arrived(*under_way.popleft())


def _arrived(
    plain: Tensor, place: Tensor | None, wait: Callable[[], object]
) -> tuple[Tensor, Tensor | None]:
    wait()
    return plain, place


def _pinned(size_bytes: int) -> UInt8[Tensor, " bytes"]:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _send(room: Tensor, cast: Tensor) -> Callable[[], object]:
    room.copy_(cast, non_blocking=True)
    event = torch.cuda.Event()
    # Of the copy's device, which is not the current device in a new thread.
    event.record(torch.cuda.current_stream(cast.device))
    return event.synchronize


def _cast(parts: Parts, dtype: torch.dtype) -> Parts:
    """Cast each part on its own device. Copy a part if its place is on a device."""
    for part, place in parts:
        cast = part.to(dtype).contiguous()
        if place is None or place.device.type == "cpu":
            yield cast, place
        else:
            place.copy_(cast)
            yield cast, None


def _are_plain(source: Tensor, dtype: torch.dtype, target: Tensor | None) -> bool:
    sides = (source,) if target is None else (source, target)
    return source.dtype == dtype and all(
        side.device.type == "cpu" and side.is_contiguous() for side in sides
    )


def pool_of(threads: int, *, apart: bool = False) -> ThreadPoolExecutor:
    """Open threads with the caller's CUDA device and stream. A new thread has device 0.

    Args:
        apart: give the threads another stream than the caller's.
    """
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(threads)
    stream = torch.cuda.Stream() if apart else torch.cuda.current_stream()
    return ThreadPoolExecutor(threads, initializer=torch.cuda.set_stream, initargs=(stream,))


def as_buffer(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    # Not .numpy(): after it, the storage cannot be resized, which offloading needs.
    plain = tensor.detach() if tensor.requires_grad else tensor
    # Not view(-1): a single element may have any stride.
    flat = plain.as_strided((plain.numel(),), (1,))
    return np.from_dlpack(flat.view(torch.uint8)).data


def _chunks(source: Tensor, target: Tensor | None, itemsize: int, size_bytes: int) -> Parts:
    """Yield matching parts of source and target, in C order."""
    if source.is_contiguous() and (target is None or target.is_contiguous()):
        source = source.view(-1)
        target = None if target is None else target.view(-1)
    if source.ndim == 0 or source.numel() == 0:
        yield source, target
        return
    step = max(1, size_bytes // (source[0].numel() * itemsize))
    for start in range(0, len(source), step):
        end = start + step
        yield source[start:end], None if target is None else target[start:end]
