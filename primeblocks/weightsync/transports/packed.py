"""Buckets one behind the other in one buffer for each trainer rank, and a reader's view of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import PlanError
from ...layout import Shard
from ..held import packed_views
from ..marker import Marker
from ..plan import Plan
from .transport import Outgoing

__all__ = ["Packed", "Pool", "pack_all", "pack_payloads", "places", "places_of_version"]

_ALIGN_BYTES = 256  # What GPUs and network cards like; every element type is aligned, too.

T = TypeVar("T")


def places(
    sizes: Mapping[int, int], *, align_bytes: int = _ALIGN_BYTES
) -> tuple[dict[int, int], int]:
    """Return the start of each bucket in a buffer, and the bytes of the buffer. Pure."""
    starts, end = {}, 0
    for index, size in sizes.items():
        starts[index] = end
        end += -(-size // align_bytes) * align_bytes
    return starts, end


def places_of_version(plan: Plan, marker: Marker, rank: int) -> tuple[dict[int, int], int]:
    """Return the places of a rank's buckets in a version: aligned where it is full. Pure."""
    sizes = {index: marker.sizes[index] for index in plan.of_rank(rank)}
    return places(sizes, align_bytes=_ALIGN_BYTES if marker.base is None else 1)


def pack_all(outgoing: Outgoing, make: Callable[[int], UInt8[Tensor, " bytes"]]) -> None:
    """Write a rank's buckets to one buffer, which `make` returns for its bytes."""
    plan = outgoing.plan
    sizes = {index: plan.buckets[index].bytes for index in plan.of_rank(outgoing.rank)}
    starts, size_bytes = places(sizes)
    buffer = make(size_bytes)
    outgoing.fill_all(
        (index, packed_views(plan, index, buffer[start : start + sizes[index]]))
        for index, start in starts.items()
    )


def pack_payloads(outgoing: Outgoing, make: Callable[[int], UInt8[Tensor, " bytes"]]) -> None:
    """Write a rank's deltas to one buffer, which `make` returns for at least their bytes."""
    payloads = {index: outgoing.payload(index) for index in outgoing.plan.of_rank(outgoing.rank)}
    sizes = {index: len(payload) for index, payload in payloads.items()}
    starts, size_bytes = places(sizes, align_bytes=1)
    # A power of two, so that buffers of other deltas fit, which are registered.
    buffer = make(1 << max(0, size_bytes - 1).bit_length())
    for index, start in starts.items():
        # Bytes of a delta may not be written to, which frombuffer asks for.
        payload = torch.frombuffer(bytearray(payloads[index]), dtype=torch.uint8)
        buffer[start : start + sizes[index]].copy_(payload)


class Packed:
    """The boxes that one reader wants, in packed buckets: a `Held` without a copy.

    A box that lies in one copy is a view; another is put together in new memory.

    Args:
        close: called once at the end.
    """

    def __init__(
        self,
        plan: Plan,
        buckets: Mapping[int, Tensor],
        *,
        stays: bool,
        close: Callable[[], object],
    ) -> None:
        self.stays, self.is_own = stays, True
        self._plan = plan
        self._views = {index: packed_views(plan, index, part) for index, part in buckets.items()}
        self._copies: dict[str, list[tuple[Shard, Tensor]]] = {}
        for index, views in self._views.items():
            for copy, view in zip(plan.buckets[index].copies, views, strict=True):
                self._copies.setdefault(copy.name, []).append((copy.box, view))
        self._device = next((part.device for part in buckets.values()), torch.device("cpu"))
        self.close = weakref.finalize(self, close)
        self.close.atexit = False

    def views(self, index: int) -> list[Tensor]:
        return self._views[index]

    def box(self, name: str, box: Shard) -> Tensor:
        made, found = None, 0
        for have, view in self._copies.get(name, ()):
            common = have.intersect(box)
            if common == box:
                return view[box.within(have).slices]
            if common is not None:
                if made is None:
                    made = torch.empty(box.sizes, dtype=view.dtype, device=view.device)
                made[common.within(box).slices].copy_(view[common.within(have).slices])
                found += common.numel
        if found != box.numel:
            raise PlanError(f"{found} of the {box.numel} elements of {box} of {name!r} are wanted")
        if made is None:
            dtype = self._plan.target[name].dtype
            made = torch.empty(box.sizes, dtype=dtype, device=self._device)
        return made


class Pool(Generic[T]):
    """Buffers of one trainer rank by version. One that is no longer read is used again.

    Args:
        make: makes a buffer of that many bytes.
        drop: ends one.
        spares: the number of unused ones that wait for a version of the same size.
    """

    def __init__(
        self, make: Callable[[int], T], drop: Callable[[T], object], *, spares: int
    ) -> None:
        self._make, self._drop, self._spares = make, drop, spares
        self._used: dict[int, tuple[int, T]] = {}
        self._free: list[tuple[int, T]] = []

    def keep(self, versions: Collection[int]) -> None:
        """Free the buffers of all other versions."""
        for version in [version for version in self._used if version not in versions]:
            self._free.append(self._used.pop(version))
        while len(self._free) > self._spares:
            self._drop(self._free.pop(0)[1])

    def take(self, version: int, size_bytes: int) -> T:
        """Return a buffer for a version. Drops spares of another size first, for their room."""
        fits = [one for one in self._free if one[0] == size_bytes]
        for one in self._free:
            if one not in fits[:1]:
                self._drop(one[1])
        self._free = []
        one = fits[0] if fits else (size_bytes, self._make(size_bytes))
        self._used[version] = one
        return one[1]

    def by_version(self) -> dict[int, T]:
        """Return the buffers in use, by version."""
        return {version: buffer for version, (_, buffer) in self._used.items()}

    def close(self) -> None:
        """Drop them all."""
        self.keep(())
        while self._free:
            self._drop(self._free.pop()[1])
