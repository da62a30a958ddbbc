"""Conversions between the names and shapes that trainer, checkpoint and engine give weights.

Elements are moved, never computed, so every conversion is exact and has a way back. What moves is
known as boxes before anything moves: a shard goes straight to where it belongs, through changes of
name and shape, and nothing is gathered.

Conversions are recorded, and so is what a loader reads: the function runs once on tensors without
memory. torch keeps the strides of every view of them, so an element that ends in a parameter is
known by its place in its checkpoint tensor, and no kind of view has a rule of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ...errors import PlanError
from ...layout import Layout, Shard
from ..manifest import (
    Manifest,
    NamedTensors,
    TensorSpec,
    as_plan_error,
    box_of,
    converts,
    describe,
    named_tensors,
)
from ..plan import Boxes, owned_boxes
from .followed import Follower
from .pieces import Piece, in_place, merge

__all__ = ["Reads", "Wiring", "filling", "record_reads", "record_wiring", "union"]


@dataclass(frozen=True)
class Wiring:
    """A conversion bound to tensors: each box of a source, and the box of a target it fills.

    Pieces overlap on neither side. Elements of a target that no piece fills are padding, zero.
    """

    sources: Manifest
    targets: Manifest
    pieces: tuple[Piece, ...]

    def inverse(self) -> Wiring:
        """Return the way back.

        Raises:
            PlanError: elements were dropped or cropped, so that there is none.
        """
        lost = [
            name
            for name, pieces in self.by_source.items()
            if sum(piece.source_box.numel for piece in pieces) != prod(self.sources[name].shape)
        ]
        if lost:
            raise PlanError(
                f"{len(lost)} tensors were dropped or cropped, such as {lost[0]!r}, and have no "
                "way back. Convert all elements, or keep the sources."
            )
        pieces = tuple(piece.inverse() for piece in self.pieces)
        return Wiring(self.targets, self.sources, pieces)

    @cached_property
    def by_source(self) -> dict[str, list[Piece]]:
        """The pieces that each source fills; none where it was dropped."""
        return _grouped(self.sources, ((piece.source, piece) for piece in self.pieces))

    @cached_property
    def by_target(self) -> dict[str, list[Piece]]:
        """The pieces that fill each target."""
        return _grouped(self.targets, ((piece.target, piece) for piece in self.pieces))

    def map(self, held: Manifest) -> list[Piece]:
        """Return the pieces of one rank's shards, in global coordinates on both sides. Local.

        Raises:
            PlanError: a name or a global shape is not what was bound, or a dtype does not convert.
        """
        _check_same(held, self.sources)
        return [
            part
            for name, spec in held.items()
            for piece in self.by_source[name]
            if (part := piece.from_source(spec.layout.shard)) is not None
        ]

    def move(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole targets from whole sources, in new memory. Local; copies each element once.

        Raises:
            PlanError: a source is missing, is sharded or has another shape.
        """
        held = describe(tensors)
        _check_same(held, self.sources)
        missing = [name for name in self.sources if name not in held]
        sharded = [name for name, spec in held.items() if not spec.layout.is_whole]
        if missing or sharded:
            raise PlanError(
                f"{len(missing)} tensors are missing and {len(sharded)} sharded, first "
                f"{(missing + sharded)[0]!r}. Pass whole tensors, or use map() for shards."
            )
        return {name: self._made(name, tensors) for name in self.targets}

    def _made(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        spec, pieces = self.targets[name], self.by_target[name]
        device = tensors[pieces[0].source].device if pieces else None
        made = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        for piece in pieces:
            source = self.sources[piece.source].layout.shard
            made[piece.target_box.slices].copy_(piece.view(tensors[piece.source], source))
        return made


@dataclass(frozen=True)
class Reads:
    """The boxes that one loader reads of a checkpoint: a target of `plan_sync`.

    Attributes:
        sources: the tensors that are read, whole.
        boxes: the boxes by name.
        inexact: name -> why its boxes hold more than what is read.
        into: the way to the parameters that `record_reads` was given, here alone.
        lost: name -> why it is not, or not all, in `into`.
    """

    sources: Manifest
    boxes: Boxes
    inexact: Mapping[str, str]
    into: Wiring | None = field(default=None, compare=False)
    lost: Mapping[str, str] = field(default_factory=dict, compare=False)

    @cached_property
    def bytes(self) -> int:
        """The bytes of all boxes."""
        return sum(
            box.numel * self.sources[name].dtype.itemsize
            for name, boxes in self.boxes.items()
            for box in boxes
        )

    def lacking(self, held: Boxes) -> list[str]:
        """Return the tensors of which `held`, disjoint boxes by name, has not all that is read."""
        return [
            name
            for name, boxes in self.boxes.items()
            if any(
                sum(part.numel for h in held.get(name, ()) if (part := box.intersect(h)))
                < box.numel
                for box in boxes
            )
        ]

    def to_json(self) -> str:
        """Return a text that `from_json` turns into equal reads."""
        boxes = {n: [(b.offsets, b.sizes) for b in each] for n, each in self.boxes.items()}
        return json.dumps([boxes, dict(self.inexact)], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, checkpoint: Manifest) -> Reads:
        """Return the reads of this checkpoint that `to_json` wrote.

        Raises:
            PlanError: it is another text.
        """
        with as_plan_error("reads"):
            rows, inexact = json.loads(text)
            boxes = {
                name: tuple(Layout(checkpoint[name].shape, box_of(*box)).shard for box in each)
                for name, each in rows.items()
            }
            return cls(_whole(checkpoint, boxes), boxes, dict(inexact))


def record_reads(
    load: Callable[[Iterable[tuple[str, Tensor]]], object],
    checkpoint: Manifest,
    *,
    into: NamedTensors = (),
) -> Reads:
    """Run a loader without data and record what it would read. Local; parameters keep their values.

    The loader gets meta tensors. What it would write of them to a parameter is not written; what it
    writes besides, such as zeros, is. It has to read in this thread. Where it fails on tensors
    without values, all tensors are read whole, and `inexact` says why.

    Args:
        load: takes every tensor of the checkpoint by name, as `Subscriber` gives them.
        into: parameters of which to record where in them elements end.
    """
    parameters = named_tensors(into)
    follower, name = Follower(parameters), ""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal name
        for name, spec in checkpoint.items():
            yield name, follower.source(name, spec)

    boxes: Boxes
    try:
        with torch.no_grad(), follower:
            load(tensors())
    except Exception as error:  # A loader may raise anything where it finds no values.
        why = f"the loader fails without values, at {name!r}: {type(error).__name__}: {error}"
        boxes = {name: (spec.whole().layout.shard,) for name, spec in checkpoint.items()}
        inexact = lost = dict.fromkeys(checkpoint, why)
    else:
        boxes = {
            name: _joined(name, follower.read[name], spec.shape)
            for name, spec in checkpoint.items()
            if name in follower.read
        }
        inexact, lost = follower.inexact, follower.lost
    written = describe({name: parameters[name] for name in parameters if name in follower.placed})
    placed = (merge(follower.placed[name].values()) for name in written)
    pieces = tuple(piece for each in placed for piece in each if piece.source not in lost)
    wiring = Wiring(_whole(checkpoint, checkpoint), written, pieces)
    return Reads(_whole(checkpoint, boxes), boxes, inexact, wiring, lost)


def record_wiring(
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], *manifests: Manifest
) -> Wiring:
    """Run a conversion without data and record where each element goes. Local.

    It may rename, slice, turn, split, stack, join and leave out, in plain torch. What it joins that
    is of no source, such as zeros, is padding.

    Args:
        convert: from whole tensors by name, which have no memory here, to those that it makes.
        manifests: those of all ranks, where each has only some of the names.

    Raises:
        PlanError: it computes with a tensor, casts or repeats it, or asks for its values; or ranks
            describe a tensor differently.
    """
    sources, follower = union(manifests), Follower()
    with torch.no_grad(), follower:
        made = dict(convert({name: follower.source(name, sources[name]) for name in sources}))
    pieces = [piece for name, one in made.items() for piece in merge(follower.pieces(name, one))]
    targets = Manifest(describe(made).tensors, sources.recipe)
    changed = {
        piece.source: f"in {piece.target!r} it is repeated, or has another dtype"
        for piece in pieces
        if sources[piece.source].dtype != targets[piece.target].dtype
        or piece.source_box.numel != piece.target_box.numel
    }
    if lost := {**follower.lost, **changed}:
        name, why = next(iter(lost.items()))
        raise PlanError(
            f"{len(lost)} of {len(sources)} tensors are not just moved, such as {name!r}: {why}. "
            "Publish under the names that there are, or convert by moves alone."
        )
    return Wiring(sources, targets, tuple(pieces))


def filling(checkpoint: Manifest, boxes: Boxes) -> Wiring:
    """Return the wiring of one reader: whole tensors, of which only these boxes are filled."""
    whole = _whole(checkpoint, boxes)
    return Wiring(whole, whole, tuple(in_place(name, box) for name in whole for box in boxes[name]))


def union(manifests: Sequence[Manifest]) -> Manifest:
    """Return all names with their global shapes."""
    specs: dict[str, TensorSpec] = {}
    for manifest in manifests:
        for name, spec in manifest.items():
            whole = spec.whole()
            if specs.setdefault(name, whole) != whole:
                raise PlanError(
                    f"{name!r} is {whole.dtype} {whole.shape} on one rank and "
                    f"{specs[name].dtype} {specs[name].shape} on another. Describe both alike."
                )
    recipes = {manifest.recipe for manifest in manifests}
    if len(recipes) > 1:
        raise PlanError(f"ranks encode with different recipes: {sorted(recipes)}")
    return Manifest(tuple(specs.items()), recipes.pop() if recipes else "")


def _check_same(held: Manifest, bound: Manifest) -> None:
    for name, spec in held.items():
        if name not in bound or bound[name].shape != spec.shape:
            wanted = bound[name].shape if name in bound else "not there"
            raise PlanError(f"{name!r} is {spec.shape}; bound was {wanted}. Bind these tensors.")
        if not converts(spec.dtype, bound[name].dtype):
            raise PlanError(
                f"{name!r} is {spec.dtype}; bound was {bound[name].dtype}. Bind these tensors."
            )


def _grouped(names: Iterable[str], pairs: Iterable[tuple[str, Piece]]) -> dict[str, list[Piece]]:
    groups: dict[str, list[Piece]] = {name: [] for name in names}
    for name, piece in pairs:
        groups[name].append(piece)
    return groups


def _whole(checkpoint: Manifest, names: Iterable[str]) -> Manifest:
    tensors = ((name, spec.whole()) for name, spec in checkpoint.items() if name in names)
    return Manifest(tuple(tensors), checkpoint.recipe)


def _joined(name: str, boxes: Iterable[Shard], shape: tuple[int, ...]) -> tuple[Shard, ...]:
    """Return disjoint boxes of the same elements, few of them."""
    cells = owned_boxes(((0, box) for box in boxes), shape)[0]
    pieces = merge(in_place(name, box) for box, _ in cells)
    return tuple(sorted((p.source_box for p in pieces), key=lambda box: box.offsets))
