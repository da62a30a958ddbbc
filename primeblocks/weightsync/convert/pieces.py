"""Boxes that move: a part of one tensor, and the part of another tensor that it fills. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from torch import Tensor

from ...layout import Shard

__all__ = ["NEW", "Piece", "in_place", "merge", "paired", "pieces_in"]

NEW = -1
# The most pieces of a view that is not a box. More pieces would take too much time.
_MOST_PIECES = 1024


@dataclass(frozen=True)
class Piece:
    """A box of a source tensor, and the box of a target tensor that gets its elements.

    Attributes:
        dims: for each dim of the target, the index of the matching dim of the source. `NEW` stands
            for a target dim that the source lacks. In source dims that `dims` does not list,
            `source_box` has size 1.
    """

    source: str
    source_box: Shard
    target: str
    target_box: Shard
    dims: tuple[int, ...]

    def inverse(self) -> Piece:
        """Return the piece that moves the same elements from the target back to the source."""
        back = [NEW] * len(self.source_box.sizes)
        for dim, origin in enumerate(self.dims):
            if origin != NEW:
                back[origin] = dim
        return Piece(self.target, self.target_box, self.source, self.source_box, tuple(back))

    def from_source(self, box: Shard) -> Piece | None:
        """Return the part of this piece in `box` of the source, or None without common elements."""
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
        """Return the part of this piece in `box` of the target, or None without common elements."""
        part = self.inverse().from_source(box)
        return part and part.inverse()

    def then(self, after: Piece) -> Piece | None:
        """Join this piece with `after`, whose source is this piece's target.

        Return None if no element moves through both pieces.
        """
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
        """Return the part of `local` that this piece moves, shaped like the target box.

        Args:
            local: the elements in the box `held` of the source.

        Raises:
            PlanError: the piece is not inside `held`.
        """
        part = local[self.source_box.within(held).slices]
        gone = [dim for dim in range(part.ndim) if dim not in self.dims]
        part = part.permute(gone + [dim for dim in self.dims if dim != NEW])[(0,) * len(gone)]
        return part[tuple(None if dim == NEW else slice(None) for dim in self.dims)]


def in_place(name: str, box: Shard) -> Piece:
    """Return the piece of a box that stays where it is, under its name."""
    return Piece(name, box, name, box, tuple(range(len(box.sizes))))


def paired(dims: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of a piece, with each new dim paired with a source dim that was dropped.

    Both have size 1. So `merge` can join experts that were split.
    """
    gone = iter([dim for dim, size in enumerate(source) if dim not in dims and size == 1])
    return tuple(
        next(gone, NEW) if dim == NEW and size == 1 else dim
        for dim, size in zip(dims, target, strict=True)
    )


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring pieces that move alike, into fewer pieces of the same elements."""
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
    """Return a key that is equal for pieces on one line along a dim of the target."""
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


def pieces_in(view: Tensor, base: Tensor) -> list[Piece] | None:
    """Return the pieces of `base`, which is dense in its storage, that a view is made of.

    Each dim of the view steps along one dim of `base`, or along several adjacent dims. Steps that
    skip elements give pieces of their own. A dim of stride 0 makes a target box larger than its
    source box. Returns None if elements repeat otherwise, or if there are too many pieces.
    """
    if view.numel() == 0:
        return []
    (first, steps), (start, dims) = _in_bytes(view), _in_bytes(base)
    order = sorted((d for d, (n, _) in enumerate(dims) if n > 1), key=lambda d: -dims[d][1])
    left, at = first - start, [0] * len(dims)
    for d in order:
        at[d], left = divmod(left, dims[d][1])
    visits = _visits(steps, dims, order)
    if visits is None:
        return None
    last = [
        at[d] + sum((n - 1) * step for _, to, n, step, _ in visits if to == d)
        for d in range(len(dims))
    ]
    runs = {v: (d, n) for v, d, n, step, inner in visits if step == inner == 1}
    single = [visit for visit in visits if not visit[3] == visit[4] == 1]
    count = prod(visit[2] for visit in single)
    if (
        any(end >= n for end, (n, _) in zip(last, dims, strict=True))
        or len({d for d, _ in runs.values()}) < len(runs)
        or count > _MOST_PIECES
    ):
        return None
    lengths = dict(runs.values())
    base_sizes = tuple(lengths.get(d, 1) for d in range(len(dims)))
    repeated = {v: n for v, (n, stride) in enumerate(steps) if not stride}
    sizes = tuple(runs[v][1] if v in runs else repeated.get(v, 1) for v in range(len(steps)))
    # If a view has a part of an element, the whole element is read.
    along = [runs[v][0] if v in runs else NEW for v in range(len(steps) - 1)]
    along = [NEW if d == len(dims) - 1 else d for d in along]
    ways = paired(along, base_sizes[:-1], sizes[:-1])
    found = []
    for index in product(*(range(n) for _, _, n, _, _ in single)):
        offsets, there = list(at), [0] * len(steps)
        for i, (v, d, _, step, inner) in zip(index, single, strict=True):
            offsets[d] += i * step
            there[v] += i * inner
        source = Shard(tuple(offsets[:-1]), base_sizes[:-1])
        found.append(Piece("", source, "", Shard(tuple(there[:-1]), sizes[:-1]), ways))
    return found


def _in_bytes(tensor: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return a tensor's first byte, and the size and stride of each dim, in bytes.

    The bytes of an element are one more dim, because a view may have another dtype than its base.
    """
    size = tensor.element_size()
    dims = [(n, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return int(tensor.storage_offset()) * size, [*dims, (size, 1)]


def _visits(
    steps: Sequence[tuple[int, int]], dims: Sequence[tuple[int, int]], order: Sequence[int]
) -> list[tuple[int, int, int, int, int]] | None:
    """Return how the dims of a view run along the dims of its base.

    Each entry is a dim of the view, a dim of the base, the number of steps, the length of a step in
    the base, and the length of a step in the view.
    """
    found = []
    for v, (length, first) in enumerate(steps):
        inner, count, stride = 1, length, first
        while count > 1 and stride:
            d = next((d for d in order if dims[d][1] <= stride), None)
            if d is None or stride % dims[d][1]:
                return None
            size, unit = dims[d]
            step = stride // unit
            visited = count if (count - 1) * step < size else size // step
            if visited < count and (size % step or count % visited):
                return None
            found.append((v, d, visited, step, inner))
            inner, count, stride = inner * visited, count // visited, size * unit
    return found
