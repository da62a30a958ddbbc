"""Forms: the parts that a shape is cut into, and the shape that given parts make. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from ...errors import PlanError
from ...layout import Shard
from .pieces import NEW

__all__ = [
    "Cut",
    "Form",
    "Gone",
    "Numbered",
    "Rounded",
    "Sections",
    "Shape",
    "Share",
    "Straight",
    "Window",
    "box_of",
]

Shape = tuple[int, ...]
_BACK = "are not known on the way back. Bind the other way round and use Wiring.inverse()."


@dataclass(frozen=True)
class Cut:
    """A part of one tensor: its template, its number, its box in the whole, and its dims there."""

    template: int
    number: int
    box: Shard
    dims: Shape

    @property
    def shape(self) -> Shape:
        return tuple(1 if dim == NEW else self.box.sizes[dim] for dim in self.dims)


class Form(Protocol):
    """One way to cut a tensor. `whole` undoes `cuts`: a shape, and the form that cuts it so."""

    def cuts(self, shape: Shape) -> list[Cut]: ...
    def whole(self, parts: Sequence[Shape]) -> tuple[Shape, Form]: ...


@dataclass(frozen=True)
class Straight:
    """One part, the whole, its dims in another order (`()` keeps the order)."""

    dims: Shape = ()

    def cuts(self, shape: Shape) -> list[Cut]:
        if self.dims and len(shape) != len(self.dims):
            raise PlanError(f"dims {self.dims} of a transpose do not fit shape {shape}")
        return [Cut(0, 0, box_of(shape), self.dims or _straight(shape))]

    def whole(self, parts: Sequence[Shape]) -> tuple[Shape, Form]:
        part = parts[0]
        if self.dims and len(part) == len(self.dims):
            return tuple(part[self.dims.index(dim)] for dim in range(len(part))), self
        return part, self


@dataclass(frozen=True)
class Sections:
    """Parts side by side along `dim`, in proportion to `parts`; None takes them as they come."""

    dim: int
    parts: tuple[int, ...] | None

    def cuts(self, shape: Shape) -> list[Cut]:
        size = _size(shape, self.dim)
        if self.parts is None:
            raise PlanError(f"the lengths of its parts {_BACK} Or give parts=.")
        # Parts that came empty have no proportion.
        total = max(1, sum(self.parts))
        if size % total:
            raise PlanError(
                f"dim {self.dim} of {shape} does not divide into parts {self.parts}: "
                f"{size} is no multiple of {total}. Give their lengths as parts=."
            )
        ends = [end * size // total for end in accumulate(self.parts, initial=0)]
        return [
            Cut(i, 0, box_of(shape, self.dim, start, end - start), _straight(shape))
            for i, (start, end) in enumerate(pairwise(ends))
        ]

    def whole(self, parts: Sequence[Shape]) -> tuple[Shape, Form]:
        lengths = tuple(_size(part, self.dim) for part in parts)
        shape = _with(parts[0], self.dim, sum(lengths))
        return shape, Sections(self.dim, lengths) if self.parts is None else self


@dataclass(frozen=True)
class Numbered:
    """Parts without `dim`, as many as it is long."""

    dim: int

    def cuts(self, shape: Shape) -> list[Cut]:
        count = _size(shape, self.dim)
        dims = tuple(dim for dim in range(len(shape)) if dim != self.dim)
        return [Cut(0, i, box_of(shape, self.dim, i, 1), dims) for i in range(count)]

    def whole(self, parts: Sequence[Shape]) -> tuple[Shape, Form]:
        return (*parts[0][: self.dim], len(parts), *parts[0][self.dim :]), self


@dataclass(frozen=True)
class Window:
    """One part: of `padded` elements along `dim`, the `size` that begin at `at`."""

    dim: int
    size: int
    padded: int
    at: int = 0

    def cuts(self, shape: Shape) -> list[Cut]:
        if _size(shape, self.dim) != self.padded:
            raise PlanError(f"dim {self.dim} of {shape} is not {self.padded} long")
        return [Cut(0, 0, box_of(shape, self.dim, self.at, self.size), _straight(shape))]

    def whole(self, parts: Sequence[Shape]) -> tuple[Shape, Form]:
        return _with(parts[0], self.dim, self.padded), self


@dataclass(frozen=True)
class Share:
    """One part: the `rank`-th of `ranks` equal parts along `dim`."""

    dim: int
    rank: int
    ranks: int

    def cuts(self, shape: Shape) -> list[Cut]:
        size, odd = divmod(_size(shape, self.dim), self.ranks)
        if odd:
            raise PlanError(f"dim {self.dim} of {shape} does not divide into {self.ranks} ranks")
        return [Cut(0, 0, box_of(shape, self.dim, self.rank * size, size), _straight(shape))]

    def whole(self, parts: Sequence[Shape]) -> tuple[Shape, Form]:
        return _with(parts[0], self.dim, _size(parts[0], self.dim) * self.ranks), self


@dataclass(frozen=True)
class Rounded:
    """One part, the front of a whole whose `dim` is rounded up to a multiple."""

    dim: int
    multiple: int

    def cuts(self, shape: Shape) -> list[Cut]:
        raise PlanError(f"the size before rounding to a multiple of {self.multiple} {_BACK}")

    def whole(self, parts: Sequence[Shape]) -> tuple[Shape, Form]:
        size = _size(parts[0], self.dim)
        padded = -(-size // self.multiple) * self.multiple
        return _with(parts[0], self.dim, padded), Window(self.dim, size, padded)


@dataclass(frozen=True)
class Gone:
    """No part at all."""

    def cuts(self, shape: Shape) -> list[Cut]:
        return []

    def whole(self, parts: Sequence[Shape]) -> tuple[Shape, Form]:
        raise AssertionError("nothing is made of no parts")


def box_of(shape: Shape, dim: int = 0, start: int = 0, size: int | None = None) -> Shard:
    """Return the box of a whole shape, or of `size` elements of one dim."""
    offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Shard(offsets, shape if size is None else _with(shape, dim, size))


def _size(shape: Shape, dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise PlanError(f"shape {shape} has no dim {dim}")
    return shape[dim]


def _with(shape: Shape, dim: int, size: int) -> Shape:
    _size(shape, dim)
    return (*shape[:dim], size, *shape[dim + 1 :])


def _straight(shape: Shape) -> Shape:
    return tuple(range(len(shape)))
