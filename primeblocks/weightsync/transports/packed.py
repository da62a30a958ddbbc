"""Buckets one behind the other in one buffer for each trainer rank, and views of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import PlanError
from ...layout import Shard
from ..held import packed_views
from ..marker import Marker
from ..outgoing import Shipment
from ..plan import Copy, Plan
from .carriers import ALIGN_BYTES, Carrier, Shared, places

__all__ = [
    "Borrowed",
    "Packed",
    "Pool",
    "pack_all",
    "pack_payloads",
    "places_of_version",
]

_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


def places_of_version(plan: Plan, marker: Marker, rank: int) -> tuple[dict[int, int], int]:
    """Return the places of a rank's buckets in a version: aligned where it is full. Pure."""
    sizes = {index: marker.sizes[index] for index in plan.of_rank(rank)}
    return places(sizes, align_bytes=ALIGN_BYTES if marker.base is None else 1)


def pack_all(outgoing: Shipment, pool: Pool) -> None:
    """Write a rank's buckets to one buffer."""
    plan = outgoing.plan
    sizes = {index: plan.buckets[index].bytes for index in plan.of_rank(outgoing.rank)}
    starts, size_bytes = places(sizes)
    buffer = pool.take(outgoing.version, size_bytes)
    outgoing.fill_all(
        (index, packed_views(plan, index, buffer[start : start + sizes[index]]))
        for index, start in starts.items()
    )


def pack_payloads(outgoing: Shipment, pool: Pool) -> None:
    """Write a rank's deltas to one buffer."""
    payloads = {index: outgoing.payload(index) for index in outgoing.plan.of_rank(outgoing.rank)}
    sizes = {index: len(payload) for index, payload in payloads.items()}
    starts, size_bytes = places(sizes, align_bytes=1)
    # A power of two, so that buffers of other deltas fit, which are registered.
    buffer = pool.take(outgoing.version, 1 << max(0, size_bytes - 1).bit_length())
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
        self.stays, self._plan = stays, plan
        self._views = {index: packed_views(plan, index, part) for index, part in buckets.items()}
        self._copies: dict[str, list[tuple[Shard, Tensor]]] = {}
        for index, views in self._views.items():
            for copy, view in zip(plan.buckets[index].copies, views, strict=True):
                self._copies.setdefault(copy.name, []).append((copy.box, view))
        self.device = next((part.device for part in buckets.values()), torch.device("cpu"))
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
            made = torch.empty(box.sizes, dtype=dtype, device=self.device)
        return made


class Borrowed:
    """A `Lent`: packed buckets in buffers of trainer ranks, not written to until it is closed."""

    stays = False

    def __init__(self, buckets: Mapping[int, Tensor], *, close: Callable[[], object]) -> None:
        self._buckets = buckets
        self.device = next((part.device for part in buckets.values()), torch.device("cpu"))
        self.close = weakref.finalize(self, close)
        self.close.atexit = False

    def chunks(
        self, index: int, copy: Copy, into: UInt8[Tensor, " bytes"] | None
    ) -> Iterator[UInt8[Tensor, " chunk"]]:
        lies = self._buckets[index][copy.offset : copy.offset + copy.bytes]
        # Few launches on a GPU; what stays in the cache on a CPU.
        step = _CHUNK_BYTES[lies.device.type]
        for start in range(0, copy.bytes, step):
            part = lies[start : start + step]
            yield part.clone() if into is None else into[start : start + step].copy_(part)


class Pool:
    """Buffers of one trainer rank by version. One that is no longer read is used again.

    One of them waits for the next version of its size.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._used: dict[int, tuple[int, Shared]] = {}
        self._spare: tuple[int, Shared] | None = None

    def keep(self, versions: Collection[int]) -> None:
        """Free the buffers of all other versions."""
        for version in [version for version in self._used if version not in versions]:
            self._drop_spare()
            self._spare = self._used.pop(version)

    def take(self, version: int, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Return a buffer for a version. Drops a spare of another size first, for its room."""
        if self._spare is None or self._spare[0] != size_bytes:
            self._drop_spare()
            self._spare = size_bytes, self._carrier.make(size_bytes)
        self._used[version], self._spare = self._spare, None
        return self._used[version][1].buffer

    def by_version(self) -> dict[int, Shared]:
        """Return the buffers in use, by version."""
        return {version: shared for version, (_, shared) in self._used.items()}

    def close(self) -> None:
        """Drop them all."""
        self.keep(())
        self._drop_spare()

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._carrier.drop(self._spare[1])
        self._spare = None
