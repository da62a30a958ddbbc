"""Elements of tensors, followed through views, copies and arithmetic by the places they came from.

torch keeps the strides of every view, so an element is known by its place in the storage that it
lies in, and no kind of view has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...layout import Layout, Shard
from ..manifest import TensorSpec

__all__ = ["Follower"]

_aten = torch.ops.aten


@dataclass
class _Origin:
    """The origin of the elements of one storage.

    Attributes:
        base: the tensor that the storage was made for.
        name: that of a checkpoint tensor; empty for one that was computed.
        parts: for a computed one, a box of `base` and the tensor of its shape that it is made of,
            element by element; without a box, a tensor of which any element may be anywhere.
    """

    base: Tensor
    name: str = ""
    parts: list[tuple[Shard | None, Tensor]] = field(default_factory=list)


class Follower(TorchDispatchMode):
    """Follows the elements of sources until they are written to a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, _Origin] = {}
        self.read: dict[str, set[Shard]] = {}
        self.inexact: dict[str, str] = {}

    def source(self, name: str, spec: TensorSpec) -> Tensor:
        made = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._origins[_storage(made)] = _Origin(made, name)
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        followed = [tensor for tensor in given if _storage(tensor) in self._origins]
        if not followed:
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._one(followed[0])
        written = _written(func, args, kwargs)
        sources = [t for t in followed if not any(t is each for each in written)]
        for target in written:
            origin = self._origins.get(_storage(target))
            for source in sources:
                if origin is None:
                    self._note(source)
                else:
                    origin.parts.append((None, source))
        if any(_storage(target) not in self._origins for target in written):
            return _as_returned(func, written)
        made = func(*tree_map(_to_meta, args), **_on_meta(kwargs))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._origins:
                parts = _parts(func, args, tensor, followed)
                self._origins[_storage(tensor)] = _Origin(tensor, parts=parts)
        return made

    def _one(self, tensor: Tensor) -> Any:
        """Stand in for the value of one element."""
        self._note(tensor)
        for name in self._names(tensor):
            self._whole(name, "the loader asks for a value of it")
        return torch.ones((), dtype=tensor.dtype).item()

    def _note(self, tensor: Tensor) -> None:
        """Note that all elements of a tensor are read."""
        origin = self._origins[_storage(tensor)]
        boxes = _boxes_in(tensor, origin.base)
        if boxes is None:
            boxes = [_hull(tensor, origin.base)]
            for name in self._names(tensor):
                self.inexact.setdefault(name, "what is read are no boxes of it")
        if origin.name:
            self.read.setdefault(origin.name, set()).update(b for b in boxes if b.numel)
        for at, part in origin.parts:
            if at is None:
                self._note(part)
                for name in self._names(part):
                    self.inexact.setdefault(name, "its elements are mixed before some are read")
                continue
            for box in boxes:
                if (common := at.intersect(box)) is not None:
                    self._note(part[common.within(at).slices])

    def _names(self, tensor: Tensor) -> set[str]:
        """Return the checkpoint tensors that a tensor is made of."""
        origin = self._origins[_storage(tensor)]
        names = {name for _, part in origin.parts for name in self._names(part)}
        return names | {origin.name} if origin.name else names

    def _whole(self, name: str, why: str) -> None:
        base = next(o.base for o in self._origins.values() if o.name == name)
        box = Layout.whole(base.shape).shard
        if self.read.get(name) != {box}:
            self.read[name] = {box}
            self.inexact[name] = why


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


def _as_returned(func: Any, written: list[Tensor]) -> Any:
    count = len(func._schema.returns)
    return None if count == 0 else written[0] if count == 1 else tuple(written)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    moved = {name: tree_map(_to_meta, value) for name, value in kwargs.items()}
    if moved.get("device") is not None:
        moved |= {"device": torch.device("meta")}
    return moved | ({"pin_memory": False} if "pin_memory" in moved else {})


def _parts(
    func: Any, args: Sequence[Any], made: Tensor, followed: Sequence[Tensor]
) -> list[tuple[Shard | None, Tensor]]:
    """Return the parts that a new tensor is made of."""
    name = func._schema.name
    if name.endswith("_like") or name.startswith("aten::new_"):
        return []  # Of a shape alone.
    whole = Layout.whole(made.shape).shard
    if torch.Tag.pointwise in func.tags or func is _aten._to_copy.default:
        return [(whole, tensor.expand(made.shape)) for tensor in followed]
    if func not in (_aten.cat.default, _aten.stack.default):
        return [(None, tensor) for tensor in followed]
    dim = (args[1] if len(args) > 1 else 0) % made.ndim
    parts: list[tuple[Shard | None, Tensor]] = []
    start = 0
    for tensor in args[0]:
        if func is _aten.cat.default and tensor.shape == (0,) and made.ndim > 1:
            continue  # Joined to anything, for old code.
        piece = tensor.unsqueeze(dim) if func is _aten.stack.default else tensor
        offsets = tuple(start if d == dim else 0 for d in range(made.ndim))
        start += piece.shape[dim]
        if any(tensor is each for each in followed):
            parts.append((Shard(offsets, tuple(piece.shape)), piece))
    return parts


def _in_bytes(tensor: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return the first byte of a tensor, and the size and stride of its dims, its bytes the last.

    In bytes, because a view may have another dtype than what it is a view of.
    """
    size = tensor.element_size()
    dims = [(n, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return int(tensor.storage_offset()) * size, [*dims, (size, 1)]


def _boxes_in(view: Tensor, base: Tensor) -> list[Shard] | None:
    """Return the boxes of `base`, dense in its storage, that a view is made of; None if not boxes.

    Each dim of the view steps along a dim of `base`, or along several that are one behind the
    other; what it visits of each is a list of intervals.
    """
    if view.numel() == 0:
        return []
    (first, steps), (start, dims) = _in_bytes(view), _in_bytes(base)
    order = sorted((d for d, (n, _) in enumerate(dims) if n > 1), key=lambda d: -dims[d][1])
    left, at = first - start, [0] * len(dims)
    for d in order:
        at[d], left = divmod(left, dims[d][1])
    visits: dict[int, list[tuple[int, int]]] = {d: [] for d in range(len(dims))}
    todo = [(n, stride) for n, stride in steps if n > 1 and stride]
    while todo:
        count, stride = todo.pop()
        d = next(d for d in order if dims[d][1] <= stride)
        size, unit = dims[d]
        if stride % unit:
            return None
        step = stride // unit
        if (count - 1) * step < size:
            visits[d].append((step, count))
        elif size % step or count % (size // step):
            return None
        else:
            visits[d].append((step, size // step))
            todo.append((count // (size // step), size * unit))
    runs = [_runs(at[d], visits[d]) for d in range(len(dims))]
    if any(
        start + n > size for line, (size, _) in zip(runs, dims, strict=True) for start, n in line
    ):
        return None
    corners: list[list[tuple[int, int]]] = [[]]
    for line in runs[:-1]:  # A part of an element is read with all of it.
        corners = [[*corner, run] for corner in corners for run in line]
    return [Shard(tuple(o for o, _ in c), tuple(n for _, n in c)) for c in corners]


def _runs(start: int, visits: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals, start and size, that steps from `start` along one dim visit."""
    runs = [(start, 1)]
    for step, count in sorted(visits):
        if len(runs) == 1 and step <= runs[0][1]:
            runs = [(start, (count - 1) * step + runs[0][1])]
        else:
            runs = [(at + i * step, n) for i in range(count) for at, n in runs]
    return runs


def _hull(view: Tensor, base: Tensor) -> Shard:
    """Return a box of `base` that has all of a view in it: its first to its last row."""
    (first, steps), (start, dims) = _in_bytes(view), _in_bytes(base)
    last = first + sum((n - 1) * stride for n, stride in steps)
    outer = max(range(base.ndim), key=lambda d: (base.shape[d] > 1, dims[d][1]))
    row, end = (first - start) // dims[outer][1], (last - start) // dims[outer][1]
    offsets, sizes = [0] * base.ndim, list(base.shape)
    offsets[outer], sizes[outer] = row, end - row + 1
    return Shard(tuple(offsets), tuple(sizes))
