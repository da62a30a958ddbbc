"""Tensors that are read later, box by box, so that transformers' conversions can run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any

from ....errors import ShapeError, UnsupportedError
from ....layout import Shard

__all__ = ["Deferred", "TensorPiece"]


@dataclass(frozen=True)
class TensorPiece:
    """A box of a deferred tensor, `place`, and the box of a source that fills `place`.

    Attributes:
        corner: the start of the box in the source.
        dims: the source's dim for each dim of the tensor. None is a dim of size 1 that the source
            lacks.
    """

    place: Shard
    source: Any
    corner: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def box(self) -> Shard:
        """The box of the source. Dims that the tensor lacks have size 1."""
        sizes = [1] * len(self.corner)
        for dim, size in zip(self.dims, self.place.sizes, strict=True):
            if dim is not None:
                sizes[dim] = size
        return Shard(self.corner, tuple(sizes))

    def cut(self, box: Shard) -> TensorPiece | None:
        """Return the part inside `box` of the tensor, or None."""
        place = self.place.intersect(box)
        if place is None:
            return None
        corner = list(self.corner)
        for dim, new, old in zip(self.dims, place.offsets, self.place.offsets, strict=True):
            if dim is not None:
                corner[dim] += new - old
        return replace(self, place=place, corner=tuple(corner))

    def filled_by(self, box: Shard) -> TensorPiece | None:
        """Return the part that a box of the source fills, or None."""
        common = self.box.intersect(box)
        if common is None:
            return None
        offsets, sizes = list(self.place.offsets), list(self.place.sizes)
        for at, dim in enumerate(self.dims):
            if dim is not None:
                offsets[at] += common.offsets[dim] - self.corner[dim]
                sizes[at] = common.sizes[dim]
        return replace(self, place=Shard(tuple(offsets), tuple(sizes)), corner=common.offsets)

    def arrange(self, read: Tensor) -> Tensor:
        """Return a view of data that was read from `box`, in the tensor's order of dims."""
        kept = [dim for dim in self.dims if dim is not None]
        lost = [dim for dim in range(read.ndim) if dim not in kept]
        return read.permute(*kept, *lost).reshape(self.place.sizes) if self.dims else read.view(())


class Deferred(Tensor):
    """A tensor without memory, which knows the boxes of its sources.

    Slices, stacks, concatenations, permutations and casts of a deferred tensor are deferred too.
    Every other operator raises UnsupportedError. Local.
    """

    pieces: tuple[TensorPiece, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[TensorPiece]
    ) -> Deferred:
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("meta")
        )
        made.pieces = tuple(pieces)
        return made

    def __init__(self, *_: Any) -> None:
        """Tensor's own initialiser takes no arguments."""

    @classmethod
    def of(cls, source: Any) -> Deferred:
        """Return a deferred tensor of a whole source. A source has a shape and a dtype."""
        shape = tuple(source.shape)
        whole = Shard((0,) * len(shape), shape)
        dims = tuple(range(len(shape)))
        return cls(shape, source.dtype, [TensorPiece(whole, source, whole.offsets, dims)])

    def within(self, box: Shard) -> Iterator[TensorPiece]:
        """Yield the pieces that fill a box, in coordinates that start at the box's corner."""
        for piece in self.pieces:
            cut = piece.cut(box)
            if cut is not None:
                yield replace(cut, place=cut.place.within(box))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = function.name().partition("::")[2].partition(".")[0]
        move = _MOVES.get(name)
        if move is None or tree_any(_is_read, args):
            raise UnsupportedError(
                f"{function.name()} cannot be deferred: its operands must be read whole."
            )
        return move(*args, **(kwargs or {}))


def _is_read(x: object) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, Deferred)


def _same(x: Deferred, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Deferred:
    return Deferred(x.shape, x.dtype if dtype is None else dtype, x.pieces)


def _narrow(x: Deferred, dim: int, start: int, stop: int) -> Deferred:
    offsets, sizes = [0] * x.ndim, list(x.shape)
    offsets[dim], sizes[dim] = start, stop - start
    return Deferred(sizes, x.dtype, list(x.within(Shard(tuple(offsets), tuple(sizes)))))


def _slice(
    x: Deferred, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Deferred:
    if step != 1:
        raise UnsupportedError(f"a slice with step {step} cannot be deferred.")
    first, last, _ = slice(start, stop).indices(x.shape[dim])
    return _narrow(x, dim % x.ndim, first, max(first, last))


def _split(x: Deferred, size: int | Sequence[int], dim: int = 0) -> list[Deferred]:
    dim, whole = dim % x.ndim, x.shape[dim]
    if isinstance(size, int):
        size = [min(size, whole - at) for at in range(0, whole, size)] if whole else [0]
    parts, start = [], 0
    for one in size:
        parts.append(_narrow(x, dim, start, start + one))
        start += one
    return parts


def _turn(x: Deferred, order: Sequence[int | None]) -> Deferred:
    """Return the tensor with its dims in another order. None is a new dim of size 1."""

    def take(values: Sequence[int], new: int) -> tuple[int, ...]:
        return tuple(new if dim is None else values[dim] for dim in order)

    pieces = [
        replace(
            piece,
            place=Shard(take(piece.place.offsets, 0), take(piece.place.sizes, 1)),
            dims=tuple(None if dim is None else piece.dims[dim] for dim in order),
        )
        for piece in x.pieces
    ]
    return Deferred(take(x.shape, 1), x.dtype, pieces)


def _permute(x: Deferred, order: Sequence[int]) -> Deferred:
    return _turn(x, [dim % x.ndim for dim in order])


def _transpose(x: Deferred, dim0: int = 0, dim1: int = 1) -> Deferred:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _turn(x, order)


def _unsqueeze(x: Deferred, dim: int) -> Deferred:
    order: list[int | None] = list(range(x.ndim))
    order.insert(dim % (x.ndim + 1), None)
    return _turn(x, order)


def _squeeze(x: Deferred, dim: int | Sequence[int] | None = None) -> Deferred:
    asked = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % x.ndim for d in asked if x.shape[d] == 1}
    return _turn(x, [d for d in range(x.ndim) if d not in gone])


def _select(x: Deferred, dim: int, index: int) -> Deferred:
    index %= x.shape[dim]
    return _squeeze(_narrow(x, dim % x.ndim, index, index + 1), dim)


def _cat(parts: Sequence[Deferred], dim: int = 0) -> Deferred:
    dim %= parts[0].ndim
    shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if len(shapes) > 1 or len({part.ndim for part in parts}) > 1:
        sizes = sorted({tuple(part.shape) for part in parts})
        raise ShapeError(f"parts of {sizes} do not make one tensor along dim {dim}.")
    pieces, start = [], 0
    for part in parts:
        for piece in part.pieces:
            offsets = list(piece.place.offsets)
            offsets[dim] += start
            pieces.append(replace(piece, place=Shard(tuple(offsets), piece.place.sizes)))
        start += part.shape[dim]
    shape = list(parts[0].shape)
    shape[dim] = start
    return Deferred(shape, parts[0].dtype, pieces)


def _stack(parts: Sequence[Deferred], dim: int = 0) -> Deferred:
    return _cat([_unsqueeze(part, dim) for part in parts], dim)


_MOVES: dict[str, Callable[..., Any]] = {
    "_to_copy": _same,
    "alias": _same,
    "cat": _cat,
    "clone": _same,
    "detach": _same,
    "permute": _permute,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _transpose,
    "transpose": _transpose,
    "unbind": lambda x, dim=0: [_select(x, dim, i) for i in range(x.shape[dim])],
    "unsqueeze": _unsqueeze,
}
