"""The bytes of one version in a reader or a writer: a blob of whole tensors, or boxes.

`Held` bytes are in memory that does not change, and are used in place. `Lent` bytes may still
change, so they are copied, and the copies are checked.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ..errors import CorruptionError, DeadlineError, PlanError, TransferError
from ..layout import Shard
from .digest import as_buffer
from .lease import Hold, Mapped
from .plan import Copy, Plan

__all__ = [
    "Blob",
    "BlobFile",
    "Boxes",
    "CachingAllocator",
    "Held",
    "Lent",
    "Sealed",
    "chunks_of",
    "copied",
    "copy_bucket",
    "in_time",
    "left_s",
    "packed_views",
    "used",
]

# A chunk is read, digested and copied while in the cache.
_CHUNK_BYTES, _LONG_ROW_BYTES = 1 << 20, 1 << 16
_LONGEST_S = 1e6  # A socket's timeout is at most 2**31 ms.


class Held(Protocol):
    """The bytes of one version, or of the part that one reader wants, in memory of this process.

    If `stays` is true, a reader keeps the bytes after a load, as a base of deltas and to go back.
    """

    stays: bool
    device: torch.device

    def views(self, index: int) -> list[Tensor]:
        """Return a tensor for each `Copy` of a bucket, shaped as the box."""
        ...

    def box(self, name: str, box: Shard) -> Tensor:
        """Return a view of a box that the reader wants, or of a part of such a box."""
        ...

    def close(self) -> None:
        """Release the bytes. Idempotent."""
        ...


@runtime_checkable
class Lent(Protocol):
    """The bytes of one version where other processes may write, such as a file.

    Lent bytes are never used in place. They are copied to `device`, and the copies are checked.
    """

    stays: bool
    device: torch.device

    def chunks(
        self, index: int, copy: Copy, into: UInt8[Tensor, " bytes"] | None
    ) -> Iterator[UInt8[Tensor, " chunk"]]:
        """Yield the bytes of one `Copy`, in C order. Each chunk is valid until the next.

        The chunks fill `into` in order. Without `into`, they are in memory of their own.
        """
        ...

    def close(self) -> None:
        """Release the bytes. Idempotent."""
        ...


class Blob:
    """Whole tensors in one buffer, at `plan.offsets`."""

    def __init__(self, plan: Plan, buffer: UInt8[Tensor, " bytes"]) -> None:
        self._plan, self._buffer = plan, buffer
        self._tensors: dict[str, Tensor] = {}

    def views(self, index: int) -> list[Tensor]:
        return [self.box(copy.name, copy.box) for copy in self._plan.buckets[index].copies]

    def box(self, name: str, box: Shard) -> Tensor:
        if name not in self._tensors:
            spec, start = self._plan.target[name], self._plan.offsets[name]
            whole = self._buffer[start : start + spec.bytes]
            self._tensors[name] = whole.view(spec.dtype).view(spec.shape)
        tensor = self._tensors[name]
        return tensor if box.sizes == tensor.shape else tensor[box.slices]


class Sealed:
    """A version in sealed memory, from byte `start` on.

    Only mappings that writers made before the seal can write to the memory. Here it is mapped in
    private pages, for one use at a time. So a load's writes to its tensors are lost afterwards.
    Writers leave the memory unchanged until `close`, and while a tensor of a mapping exists.

    Args:
        take: returns a mapping.
        give: keeps a mapping for the next version in this memory.
    """

    stays, device = True, torch.device("cpu")

    def __init__(
        self,
        plan: Plan,
        hold: Hold,
        take: Callable[[], np.ndarray],
        give: Callable[[np.ndarray], object],
        *,
        start: int,
    ) -> None:
        self._plan, self._take, self._start = plan, take, start
        self._mapped = Mapped(hold, give)
        self._whole: UInt8[Tensor, " bytes"] | None = None
        self._blob: Blob | None = None
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, self._mapped.close)

    def views(self, index: int) -> list[Tensor]:
        return self._used().views(index)

    def box(self, name: str, box: Shard) -> Tensor:
        return self._used().box(name, box)

    def rest(self, *, is_right: bool = True) -> None:
        """End a use. A mapping with wrong bytes, or that was written to, is not used again."""
        with self._lock:
            if self._whole is not None:
                self._mapped.is_clean = is_right and self._whole._version == 0
                # This unmaps the bytes, unless a caller still holds one of the tensors.
                self._blob = self._whole = None
                self._mapped.is_clean = False

    def close(self) -> None:
        self.rest()
        self._end()

    def _used(self) -> Blob:
        with self._lock:
            if self._blob is None:
                with torch.inference_mode(False):  # Inference mode does not count writes.
                    self._whole = torch.from_numpy(self._mapped.add(self._take()))
                self._blob = Blob(self._plan, self._whole[self._start :])
            return self._blob


@contextmanager
def used(held: Held | Lent) -> Iterator[None]:
    """Use bytes. Sealed bytes are mapped for this use. After an error the mapping is not kept."""
    is_right = False
    try:
        yield
        is_right = True
    finally:
        if isinstance(held, Sealed):
            held.rest(is_right=is_right)


class BlobFile:
    """A version in a file, from byte `start` on. Implements `Lent`.

    The file is read and not mapped. So a file that was cut short causes an error, not a SIGBUS.
    """

    stays, device = True, torch.device("cpu")

    def __init__(self, plan: Plan, hold: Hold, *, start: int) -> None:
        self._plan, self._hold, self._start = plan, hold, start
        self.close = weakref.finalize(self, hold.close)

    def chunks(
        self, index: int, copy: Copy, into: UInt8[Tensor, " bytes"] | None
    ) -> Iterator[UInt8[Tensor, " chunk"]]:
        spec = self._plan.target[copy.name]
        at = self._start + self._plan.offsets[copy.name]
        end = 0
        for first, rows, stride, run in _spans(spec.shape, copy.box, spec.dtype.itemsize):
            # Short rows are read together, with the bytes between them.
            step = max(1, _CHUNK_BYTES // stride) if run < _LONG_ROW_BYTES else 1
            for row in range(0, rows, step):
                count = min(step, rows - row)
                for skip in range(0, run, _CHUNK_BYTES):
                    size = min(_CHUNK_BYTES, run - skip)
                    room = None if into is None else into[end : end + count * size]
                    place = at + first + row * stride + skip
                    yield self._rows(place, count, stride, size, room)
                    end += count * size

    def _rows(
        self, at: int, count: int, stride: int, size: int, into: UInt8[Tensor, " bytes"] | None
    ) -> UInt8[Tensor, " bytes"]:
        if into is None:
            into = torch.empty(count * size, dtype=torch.uint8, device="cpu")
        if count == 1:
            self._read(at, into)
            return into
        both = torch.empty((count - 1) * stride + size, dtype=torch.uint8, device="cpu")
        self._read(at, both)
        into.view(count, size).copy_(both.as_strided((count, size), (stride, 1)))
        return into

    def _read(self, at: int, into: UInt8[Tensor, " bytes"]) -> None:
        room, done = as_buffer(into), 0
        while done < len(room):
            try:
                count = os.preadv(self._hold.fd, [room[done:]], at + done)
            except OSError as error:
                raise TransferError(
                    f"a file of weights cannot be read: {error}. Check the disk, and receive again."
                ) from error
            if count == 0:
                raise CorruptionError(
                    f"a file of weights ends at {at + done} bytes; it must have at least "
                    f"{at + len(room)}. Publish again."
                )
            done += count


class Boxes:
    """The boxes that one reader wants. Each is a tensor of its own, allocated at its first use.

    Args:
        served: an engine's own tensors, one for each name, to use instead of new memory.
    """

    def __init__(
        self,
        plan: Plan,
        reader: int,
        *,
        stays: bool,
        device: torch.device | str = "cpu",
        served: Mapping[str, Tensor] | None = None,
        memory: CachingAllocator | None = None,
    ) -> None:
        self._plan, self.stays, self.device = plan, stays, torch.device(device)
        self._wants = plan.wants[reader]
        self._memory = CachingAllocator() if memory is None else memory
        self._lock = threading.Lock()
        self._boxes: dict[str, list[tuple[Shard, Tensor]]] = {
            name: [(self._wants[name][0], tensor)] for name, tensor in (served or {}).items()
        }

    def views(self, index: int) -> list[Tensor]:
        return [self.box(copy.name, copy.box) for copy in self._plan.buckets[index].copies]

    def box(self, name: str, box: Shard) -> Tensor:
        for held, tensor in self._of(name):
            if held == box:
                return tensor
            if held.intersect(box) == box:
                return tensor[box.within(held).slices]
        raise PlanError(
            f"the reader does not want a box of {name!r} that contains {box}. Plan with the "
            "wiring in use."
        )

    def drop(self, name: str) -> None:
        self._boxes.pop(name, None)

    def close(self) -> None:
        """Do nothing. The tensors are freed with their last user."""

    def _of(self, name: str) -> list[tuple[Shard, Tensor]]:
        with self._lock:
            if name not in self._boxes:
                made = [(box, self._make(name, box)) for box in self._wants.get(name, ())]
                self._boxes[name] = made
            return self._boxes[name]

    def _make(self, name: str, box: Shard) -> Tensor:
        dtype = self._plan.target[name].dtype
        if self.device.type != "cpu" or box.numel == 0:
            return torch.empty(box.sizes, dtype=dtype, device=self.device)
        return self._memory.take(box.numel * dtype.itemsize).view(dtype).view(box.sizes)


class CachingAllocator:
    """Reuses memory of freed tensors, because fresh pages cost as much as several copies."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Return memory that no other tensor uses, with undefined contents. Thread-safe."""
        try:
            array = self._free.setdefault(size_bytes, []).pop()
        except IndexError:
            array = np.empty(size_bytes, dtype=np.uint8)
        # Each view of the tensor has a reference to this view, but not to the array.
        view = array[:]
        weakref.finalize(view, _give_back, weakref.ref(self), array).atexit = False
        return torch.from_numpy(view)


def _give_back(allocator: weakref.ref[CachingAllocator], array: np.ndarray) -> None:
    if (owner := allocator()) is not None:
        owner._free[array.nbytes].append(array)


def chunks_of(
    plan: Plan, index: int, lent: Lent, into: Sequence[Tensor] | None
) -> Iterator[UInt8[Tensor, " chunk"]]:
    """Yield the bytes of a lent bucket, in digest order. Each chunk is valid until the next.

    `into` are tensors that keep the bytes, one for each `Copy` of the bucket.
    """
    for place, copy in enumerate(plan.buckets[index].copies):
        if into is None:
            yield from lent.chunks(index, copy, None)
            continue
        room = into[place].contiguous()
        yield from lent.chunks(index, copy, room.view(-1).view(torch.uint8))
        if room is not into[place]:
            into[place].copy_(room)


def copied(plan: Plan, reader: int, held: Lent, *, stays: bool, deadline: float) -> Boxes:
    """Copy a reader's boxes, unchecked, into the reader's memory, or raise DeadlineError."""
    boxes = Boxes(plan, reader, stays=stays, device=held.device)
    mine = plan.of_reader(reader)
    for done, index in enumerate(mine):
        in_time(deadline, f"the reader copied {done} of {len(mine)} buckets in time")
        copy_bucket(plan, index, held, boxes.views(index))
    in_time(deadline, f"the reader copied all {len(mine)} buckets, but after the deadline")
    return boxes


def in_time(deadline: float, done: str) -> None:
    """Raise DeadlineError after `deadline` (time.monotonic). `done` begins the message."""
    if time.monotonic() > deadline:
        raise DeadlineError(f"{done}. Pass a longer timeout_s.")


def left_s(deadline: float, *, least_s: float = 0.0) -> float:
    """Return the seconds until `deadline`, or 1e6 if more are left, as for a deadline of inf."""
    return min(max(least_s, deadline - time.monotonic()), _LONGEST_S)


def copy_bucket(plan: Plan, index: int, held: Held | Lent, into: Sequence[Tensor]) -> None:
    """Copy one bucket, unchecked, into tensors, one for each `Copy` of the bucket."""
    if isinstance(held, Lent):
        for _ in chunks_of(plan, index, held, into):
            pass  # The bytes are now in `into`.
    else:
        for room, piece in zip(into, held.views(index), strict=True):
            room.copy_(piece)


def packed_views(plan: Plan, index: int, buffer: UInt8[Tensor, " bytes"]) -> list[Tensor]:
    """Return a view of a packed bucket for each `Copy` of the bucket, shaped as the box."""
    return [
        buffer[c.offset : c.offset + c.bytes].view(plan.target[c.name].dtype).view(c.box.sizes)
        for c in plan.buckets[index].copies
    ]


def _spans(
    shape: tuple[int, ...], box: Shard, itemsize: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield groups of rows of a box: the first byte, the number of rows, their stride and size."""
    if box.numel == 0:
        return
    strides = [prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    # The last dim that is cut. The elements behind it are contiguous.
    cut = max((dim for dim, size in enumerate(shape) if box.sizes[dim] < size), default=0)
    run = prod(box.sizes[cut:]) * itemsize
    first = sum(at * stride for at, stride in zip(box.offsets, strides, strict=True))
    rows, stride = (box.sizes[cut - 1], strides[cut - 1]) if cut else (1, run)
    outer = [range(size) for size in box.sizes[: max(0, cut - 1)]]
    for place in product(*outer):
        yield first + sum(i * s for i, s in zip(place, strides, strict=False)), rows, stride, run
