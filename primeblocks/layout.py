"""Where a local tensor sits in a global one."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from .errors import PlanError

__all__ = ["Layout", "Shard", "layout_of"]


@dataclass(frozen=True)
class Shard:
    """A box of a global tensor: one offset and one size for each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise PlanError(f"{len(self.offsets)} offsets for {len(self.sizes)} sizes")
        if any(value < 0 for value in (*self.offsets, *self.sizes)):
            raise PlanError(f"negative box: offsets {self.offsets}, sizes {self.sizes}")

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index the global tensor with this to get the box."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Shard) -> Shard | None:
        """The common box, in global coordinates, or None where there is none."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        ends = [
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Shard(tuple(starts), sizes)

    def within(self, outer: Shard) -> Shard:
        """The same box in coordinates that start at `outer`'s corner.

        Raises:
            PlanError: the box does not lie inside `outer`.
        """
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        inside = all(
            o >= 0 and o + n <= size
            for o, n, size in zip(offsets, self.sizes, outer.sizes, strict=True)
        )
        if not inside:
            raise PlanError(f"{self} does not lie inside {outer}")
        return Shard(offsets, self.sizes)


@dataclass(frozen=True)
class Layout:
    """A global shape and the box of it that one rank holds."""

    shape: tuple[int, ...]
    shard: Shard

    def __post_init__(self) -> None:
        self.shard.within(Shard((0,) * len(self.shape), self.shape))

    @classmethod
    def whole(cls, shape: tuple[int, ...] | torch.Size) -> Layout:
        """The layout of a tensor that is held in full."""
        return cls(tuple(shape), Shard((0,) * len(shape), tuple(shape)))

    @property
    def is_whole(self) -> bool:
        return self.shard.sizes == self.shape


def layout_of(tensor: torch.Tensor) -> Layout:
    """Say which box of its global tensor the local part of `tensor` is.

    A plain tensor is whole. A DTensor may be sharded over any mix of mesh axes, the strided
    order that FSDP2 makes over expert-parallel shards included. Local; moves no data.

    Raises:
        PlanError: the DTensor holds partial sums, which have no place yet.
    """
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(tensor, DTensor):
        return Layout.whole(tensor.shape)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise PlanError(f"a partial DTensor {tensor.placements} has no layout. Redistribute it.")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if 0 in sizes:
        # torch places empty shards past the end.
        offsets = tuple(min(o, n) for o, n in zip(offsets, tensor.shape, strict=True))
    return Layout(tuple(tensor.shape), Shard(tuple(offsets), tuple(sizes)))
