"""Boxes that move: a part of one tensor and the part of another that it fills. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...layout import Shard

__all__ = ["NEW", "Piece", "merge", "paired", "whole_piece"]

NEW = -1


@dataclass(frozen=True)
class Piece:
    """A box of a source tensor and the box of a target tensor that takes its elements.

    Attributes:
        dims: for each dim of the target, the source's dim that runs along it, or `NEW` for a dim
            of size 1 that the source lacks. Source dims that are not named have size 1.
    """

    source: str
    source_box: Shard
    target: str
    target_box: Shard
    dims: tuple[int, ...]

    def inverse(self) -> Piece:
        """Return the way back."""
        back = [NEW] * len(self.source_box.sizes)
        for dim, origin in enumerate(self.dims):
            if origin != NEW:
                back[origin] = dim
        return Piece(self.target, self.target_box, self.source, self.source_box, tuple(back))

    def from_source(self, box: Shard) -> Piece | None:
        """Return the part that `box` of the source fills, or None where it fills nothing."""
        common = self.source_box.intersect(box)
        if common is None:
            return None
        if common == self.source_box:
            return self
        offsets, sizes = list(self.target_box.offsets), list(self.target_box.sizes)
        for dim, origin in enumerate(self.dims):
            if origin != NEW:
                offsets[dim] += common.offsets[origin] - self.source_box.offsets[origin]
                sizes[dim] = common.sizes[origin]
        target_box = Shard(tuple(offsets), tuple(sizes))
        return replace(self, source_box=common, target_box=target_box)

    def to_target(self, box: Shard) -> Piece | None:
        """Return the part that fills `box` of the target, or None where nothing does."""
        part = self.inverse().from_source(box)
        return part and part.inverse()

    def then(self, after: Piece) -> Piece | None:
        """Join this piece to `after`, through the tensor between; None where they do not meet."""
        first, last = self, after
        if self.target_box != after.source_box:
            part, rest = self.to_target(after.source_box), after.from_source(self.target_box)
            if part is None or rest is None:
                return None
            first, last = part, rest
        dims = [NEW if dim == NEW else first.dims[dim] for dim in last.dims]
        ways = paired(dims, first.source_box.sizes, last.target_box.sizes)
        return Piece(first.source, first.source_box, last.target, last.target_box, ways)

    def view(self, local: Tensor, held: Shard) -> Tensor:
        """Return a view of `local`, box `held` of the source, shaped like the target box it fills.

        Raises:
            PlanError: the piece is not inside `held`.
        """
        part = local[self.source_box.within(held).slices]
        gone = [dim for dim in range(part.ndim) if dim not in self.dims]
        part = part.permute(gone + [dim for dim in self.dims if dim != NEW])[(0,) * len(gone)]
        return part[tuple(None if dim == NEW else slice(None) for dim in self.dims)]


def whole_piece(name: str, shape: tuple[int, ...]) -> Piece:
    """Return the piece of a tensor that fills itself."""
    box = Shard((0,) * len(shape), shape)
    return Piece(name, box, name, box, tuple(range(len(shape))))


def paired(dims: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Return dims of a piece in which a source dim that fell away stands for a new one.

    Both have size 1. As one dim they can be merged with their neighbours, which is how experts that
    were taken apart come together.
    """
    gone = iter([dim for dim, size in enumerate(source) if dim not in dims and size == 1])
    return tuple(
        next(gone, NEW) if dim == NEW and size == 1 else dim
        for dim, size in zip(dims, target, strict=True)
    )


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours that move alike; the same elements in fewer pieces."""
    pieces = list(pieces)
    if len(pieces) < 2:
        return pieces
    for dim in range(max(len(piece.dims) for piece in pieces)):
        pieces = _merge_along(pieces, dim)
    return pieces


def _merge_along(pieces: list[Piece], dim: int) -> list[Piece]:
    merged: list[Piece] = []
    alike: dict[object, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if dim < len(piece.dims) and piece.dims[dim] != NEW:
            alike[_line(piece, dim)].append(piece)
        else:
            merged.append(piece)
    for group in alike.values():
        group.sort(key=lambda piece: piece.target_box.offsets[dim])
        last = group[0]
        for piece in group[1:]:
            if _end(last.target_box, dim) == piece.target_box.offsets[dim]:
                last = _grown(last, dim, piece.target_box.sizes[dim])
            else:
                merged.append(last)
                last = piece
        merged.append(last)
    return merged


def _line(piece: Piece, dim: int) -> object:
    """Return the key of the line along a dim of the target that a piece lies on."""
    source, target, origin = piece.source_box, piece.target_box, piece.dims[dim]
    shift = source.offsets[origin] - target.offsets[dim]
    boxes = _without(source, origin), _without(target, dim)
    return piece.source, piece.target, piece.dims, shift, boxes


def _without(box: Shard, dim: int) -> Shard:
    drop = slice(dim + 1, None)
    offsets, sizes = box.offsets, box.sizes
    return Shard(offsets[:dim] + offsets[drop], sizes[:dim] + sizes[drop])


def _end(box: Shard, dim: int) -> int:
    return box.offsets[dim] + box.sizes[dim]


def _grown(piece: Piece, dim: int, by: int) -> Piece:
    return replace(
        piece,
        source_box=_longer(piece.source_box, piece.dims[dim], by),
        target_box=_longer(piece.target_box, dim, by),
    )


def _longer(box: Shard, dim: int, by: int) -> Shard:
    sizes = list(box.sizes)
    sizes[dim] += by
    return Shard(box.offsets, tuple(sizes))
