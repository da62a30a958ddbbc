"""The position of a local tensor in a global tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from .errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Layout", "Shard", "layout_of", "local_part"]


@dataclass(frozen=True)
class Shard:
    """A box of a global tensor, with one offset and one size per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise PlanError(
                f"a Shard needs one offset per size; got {len(self.offsets)} offsets and "
                f"{len(self.sizes)} sizes"
            )
        if any(value < 0 for value in (*self.offsets, *self.sizes)):
            raise PlanError(
                f"a box must not have negative numbers; got offsets {self.offsets}, sizes "
                f"{self.sizes}"
            )

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the box from the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Shard) -> Shard | None:
        """Return the box that two shards share, or None if the two shards do not overlap.

        Raises:
            PlanError: the shards have different numbers of dims.
        """
        if len(self.sizes) != len(other.sizes):
            raise PlanError(f"{self} and {other} have different numbers of dims")
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
        """Return this box with offsets relative to the offsets of `outer`.

        Raises:
            PlanError: this box is not inside `outer`.
        """
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=False))
        inside = len(self.sizes) == len(outer.sizes) and all(
            o >= 0 and o + n <= size
            for o, n, size in zip(offsets, self.sizes, outer.sizes, strict=True)
        )
        if not inside:
            raise PlanError(f"{self} is not inside {outer}")
        return Shard(offsets, self.sizes)


@dataclass(frozen=True)
class Layout:
    """The shape of a global tensor, and the box of this tensor that one rank stores."""

    shape: tuple[int, ...]
    shard: Shard

    def __post_init__(self) -> None:
        self.shard.within(Shard((0,) * len(self.shape), self.shape))

    @classmethod
    def whole(cls, shape: tuple[int, ...] | torch.Size) -> Layout:
        """Return the layout of a tensor that one rank stores completely."""
        return cls(tuple(shape), Shard((0,) * len(shape), tuple(shape)))

    @property
    def is_whole(self) -> bool:
        return self.shard.sizes == self.shape


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of the part of `tensor` that this rank stores. Local.

    A plain tensor counts as the whole global tensor. A DTensor may be sharded over any mix of mesh
    axes, including the strided shards that FSDP2 makes of expert-parallel shards. A rank outside of
    the DTensor's mesh stores an empty box. The function does not copy or send data.

    Raises:
        PlanError: the DTensor has partial sums, or the local rows have gaps, for example if the
            DTensor has only a strided shard. Also raised if the shape of the local part
            contradicts the placements, for example if FSDP2 splits uneven shards of the same dim.
    """
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(tensor, DTensor):
        return Layout.whole(tensor.shape)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise PlanError(f"a partial DTensor {tensor.placements} has no layout. Redistribute it.")
    if tensor.device_mesh.get_coordinate() is None:
        if not tensor.shape:
            raise PlanError(
                "a DTensor without dims has no empty part, so it has no layout on a rank outside "
                "of its mesh"
            )
        nothing = (0,) * tensor.ndim
        return Layout(tuple(tensor.shape), Shard(nothing, nothing))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    held = tuple(tensor.to_local().shape)
    if held != tuple(sizes) and not (0 in held and 0 in sizes):
        raise PlanError(
            f"this rank holds {held} of a tensor of {tuple(tensor.shape)}, but its placements "
            f"{tensor.placements} give {tuple(sizes)}. Use sizes that all mesh axes divide."
        )
    if 0 in sizes:
        # torch places empty shards past the end.
        offsets = tuple(min(o, n) for o, n in zip(offsets, tensor.shape, strict=True))
    else:
        _refuse_gaps(tensor)
    return Layout(tuple(tensor.shape), Shard(tuple(offsets), tuple(sizes)))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank stores, or a plain tensor itself. Local.

    The result shares memory with `tensor`.
    """
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_gaps(tensor: DTensor) -> None:
    """Refuse a local part with gaps. A placement splits the rows that earlier placements left."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "of a rank on the mesh"
    strided = {getattr(p, "dim", 0) for p in tensor.placements if hasattr(p, "split_factor")}
    for dim in strided:
        rows = torch.arange(tensor.shape[dim])
        for axis, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) != dim:
                continue
            # A strided shard splits each of `split_factor` parts, a plain shard the whole.
            parts = _chunk_sizes(len(rows), getattr(placement, "split_factor", 1))
            ranks, mine = tensor.device_mesh.size(axis), coordinate[axis]
            rows = torch.cat(
                [part.split(_chunk_sizes(len(part), ranks))[mine] for part in rows.split(parts)]
            )
        if int(rows[-1] - rows[0]) >= len(rows):
            raise PlanError(
                f"rows {rows.tolist()[:8]} of dim {dim} are not one box: {tensor.placements} on a "
                f"mesh of {tuple(tensor.device_mesh.shape)}. Redistribute the tensor to "
                f"Shard({dim})."
            )


def _chunk_sizes(size: int, parts: int) -> list[int]:
    """Return the sizes of `torch.chunk`, followed by 0 for each part that it leaves out."""
    most = -(-size // parts)
    return [max(0, min(most, size - most * part)) for part in range(parts)]
