"""Follow the elements of tensors through views, copies and arithmetic.

The strides of a view identify each element by its place in its storage, for every kind of view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...layout import Layout, Shard
from ..manifest import TensorSpec
from .pieces import Piece, in_place, pieces_in

__all__ = ["Follower"]

_aten = torch.ops.aten
# The names of operations that make zeros, or memory to be written.
_ZEROS = "zero", "empty"
# Operations that only move elements.
_MOVES = (
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.alias.default,
    _aten.cat.default,
    _aten.stack.default,
)


@dataclass
class _Origin:
    """The origin of the elements of one storage.

    Attributes:
        base: the tensor that the storage was made for.
        name: the name of a checkpoint tensor. Empty for a computed tensor.
        parts: for a computed tensor, boxes of `base`, each with the tensor of the same shape that
            fills it, element by element. Without a box, its elements may be anywhere.
        is_moved: whether the elements are unchanged.
    """

    base: Tensor
    name: str = ""
    parts: list[tuple[Shard | None, Tensor]] = field(default_factory=list)
    is_moved: bool = True


class Follower(TorchDispatchMode):
    """Follows the elements of sources until they are written to an ordinary tensor.

    Args:
        into: tensors by name. The follower notes which elements are written to each.

    Attributes:
        read: for each source, boxes with all elements that are written to some tensor.
        inexact: name -> why its boxes in `read` also have elements that are not written.
        targets: the names of the tensors of `into` that sources were copied to.
        placed: for each tensor of `into`, the pieces that were written, in order. A piece without
            a source stands for elements that got other values.
        lost: name -> why some elements that were read are changed, or are not in `placed`.
        constant: operations that joined a source to values other than zeros, and the names of
            tensors that are made of such values.
    """

    def __init__(self, into: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self._origins: dict[int, _Origin] = {}
        self._into = {_storage(one): (name, one) for name, one in (into or {}).items()}
        self.read: dict[str, set[Shard]] = defaultdict(set)
        self.inexact: dict[str, str] = {}
        self.targets: set[str] = set()
        self.placed: dict[str, list[Piece]] = defaultdict(list)
        self.lost: dict[str, str] = {}
        self.constant: list[str] = []
        # By storage, tensors without memory whose values are not zeros.
        self._filled: dict[int, Tensor] = {}

    def source(self, name: str, spec: TensorSpec) -> Tensor:
        made = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._origins[_storage(made)] = _Origin(made, name)
        return made

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """Return the pieces of sources that make up a tensor.

        Sets `lost` if pieces are missing, and `constant` if the tensor has other values.
        """
        if self._is_filled(tensor):
            self.constant.append(name)
        if _storage(tensor) not in self._origins:
            return []
        return [replace(piece, target=name) for piece in self._follow(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        followed = [tensor for tensor in given if _storage(tensor) in self._origins]
        written = _written(func, args, kwargs)
        self._note(written)
        self._check_joined(func, given)
        if not followed:
            made = func(*args, **kwargs)
            self._note_filled(func, given, made)
            return made
        if func is _aten._local_scalar_dense.default:
            return self._one(followed[0])
        sources = [t for t in followed if not any(t is each for each in written)]
        self._note_filled(func, (), () if sources else written)
        for target in written:
            origin = self._origins.get(_storage(target))
            if origin is not None:
                origin.is_moved = False
                origin.parts += [(None, source) for source in sources]
            elif func is _aten.copy_.default and sources:
                self._place(sources[0].expand(target.shape), target)
            else:
                for source in sources:
                    self._read(source, lost="it is computed with")
        if any(_storage(target) not in self._origins for target in written):
            count = len(func._schema.returns)
            return None if count == 0 else written[0] if count == 1 else tuple(written)
        made = func(*tree_map(_to_meta, args), **_on_meta(kwargs))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._origins:
                parts = _parts(func, args, tensor, followed)
                # Into a parameter a cast is part of the copy. Between two tensors it may round.
                is_cast = not self._into and any(one.dtype != tensor.dtype for one in followed)
                is_moved = func in _MOVES and not is_cast
                self._origins[_storage(tensor)] = _Origin(tensor, "", parts, is_moved)
        if _is_of_shape(func):
            self._note_filled(func, (), made)
        return made

    def _note_filled(self, func: Any, given: Sequence[Tensor], made: Any) -> None:
        """Note tensors without memory that are made of constants."""
        if func._schema.name.removeprefix("aten::").removeprefix("new_").startswith(_ZEROS):
            return
        held = [tensor for tensor in given if tensor.is_meta]
        is_moved = bool(held) and (func.is_view or func in _MOVES)
        if not is_moved or any(_storage(one) in self._filled for one in held):
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    self._filled[_storage(tensor)] = tensor

    def _check_joined(self, func: Any, given: Sequence[Tensor]) -> None:
        if func not in (_aten.cat.default, _aten.stack.default):
            return
        followed = (_storage(one) in self._origins for one in given)
        if any(followed) and any(map(self._is_filled, given)):
            self.constant.append(func._schema.name)

    def _is_filled(self, tensor: Tensor) -> bool:
        held = not tensor.is_meta and bool(tensor.any())
        return held or _storage(tensor) in self._filled

    def _one(self, tensor: Tensor) -> Any:
        """Return a stand-in for the value of one element."""
        self._read(tensor, lost="its values are asked for")
        for name in self._names(tensor):
            self._whole(name, "its values are asked for")
        return torch.ones((), dtype=tensor.dtype).item()

    def _note(self, targets: Sequence[Tensor]) -> None:
        for target in targets:
            if (found := self._into.get(_storage(target))) is not None:
                name, base = found
                parts = pieces_in(target, base)
                whole = [Layout.whole(base.shape).shard]
                boxes = whole if parts is None else [part.source_box for part in parts]
                self.placed[name] += [in_place("", box) for box in boxes]

    def _place(self, source: Tensor, target: Tensor) -> None:
        """Note that the elements of `source` are written to those of `target`, one to one."""
        name, base = self._into.get(_storage(target), ("", target))
        pieces = self._read(source, lost="" if name else "it is copied to no parameter")
        if name:
            self.targets.add(name)
        left = sum(piece.target_box.numel for piece in pieces)
        for there in pieces_in(target, base) or () if name else ():
            back = replace(there.inverse(), target=name)
            for whole in (piece.then(back) for piece in pieces):
                if whole is not None and whole.source_box.numel == whole.target_box.numel:
                    self.placed[name].append(whole)
                    left -= whole.target_box.numel
        for piece in pieces if left else ():
            self.lost.setdefault(
                piece.source, "it is repeated, or cut into parts that are not boxes"
            )

    def _read(self, tensor: Tensor, *, inexact: str = "", lost: str = "") -> list[Piece]:
        """Note that all elements of a tensor are read, and return its pieces."""
        pieces = self._follow(tensor)
        for piece in pieces:
            self.read[piece.source].add(piece.source_box)
            if inexact:
                self.inexact.setdefault(piece.source, inexact)
            if lost or inexact:
                self.lost.setdefault(piece.source, lost or inexact)
        return pieces

    def _follow(self, tensor: Tensor) -> list[Piece]:
        """Return the pieces of sources that a tensor is made of.

        Elements that are not in boxes are noted as read.
        """
        origin = self._origins[_storage(tensor)]
        within = pieces_in(tensor, origin.base)
        narrower = tensor.element_size() < origin.base.element_size()
        is_cut = not self._into and bool(origin.parts) and narrower
        if within is None or is_cut:
            self._read(origin.base, inexact="its elements are not read in boxes")
            return []
        found = [replace(piece, source=origin.name) for piece in within] if origin.name else []
        for at, part in origin.parts if within else ():
            if at is None:
                self._read(part, inexact="its elements are mixed before some are read")
                continue
            for rest in within:
                if (common := at.intersect(rest.source_box)) is None:
                    continue
                for piece in self._follow(part[common.within(at).slices]):
                    there = piece.target_box
                    offsets = (a + b for a, b in zip(there.offsets, common.offsets, strict=True))
                    moved = replace(piece, target_box=Shard(tuple(offsets), there.sizes))
                    joined = moved.then(rest)
                    assert joined is not None, "it is inside"
                    found.append(joined)
        if not origin.is_moved:
            for piece in found:
                self.lost.setdefault(piece.source, "it is computed with")
        return found

    def _names(self, tensor: Tensor) -> set[str]:
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


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    moved = {name: tree_map(_to_meta, value) for name, value in kwargs.items()}
    if moved.get("device") is not None:
        moved |= {"device": torch.device("meta")}
    return moved | ({"pin_memory": False} if "pin_memory" in moved else {})


def _is_of_shape(func: Any) -> bool:
    """Return whether an operation takes the shape of a tensor alone."""
    name = func._schema.name
    return name.endswith("_like") or name.startswith("aten::new_")


def _parts(
    func: Any, args: Sequence[Any], made: Tensor, followed: Sequence[Tensor]
) -> list[tuple[Shard | None, Tensor]]:
    if _is_of_shape(func):
        return []
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
            continue  # torch.cat accepts such a tensor next to any shape.
        piece = tensor.unsqueeze(dim) if func is _aten.stack.default else tensor
        offsets = tuple(start if d == dim else 0 for d in range(made.ndim))
        start += piece.shape[dim]
        if any(tensor is each for each in followed):
            parts.append((Shard(offsets, tuple(piece.shape)), piece))
    return parts
