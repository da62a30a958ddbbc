"""Conversions of weights between the names and shapes of trainer, checkpoint and engine.

A conversion only moves elements, so it is exact. To record it, its function runs once on tensors
without memory. The strides of the results say which box of a source fills which box of a target. So
a shard goes directly to its place, and no tensor is gathered. The reads of a loader are recorded in
the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ...errors import PlanError, shown
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
from ..plan import Boxes, Plan, owned_boxes
from .followed import Follower
from .pieces import NEW, Piece, in_place, merge

__all__ = ["Reads", "Wiring", "check_wiring", "filling", "record_reads", "record_wiring", "union"]

_SCALES = "_scale_inv"  # The name of a matrix's scales ends so, as in DeepSeek-V3's checkpoints.


@dataclass(frozen=True)
class Wiring:
    """A recorded conversion: which box of a source fills which box of a target.

    Pieces from `record_wiring` do not overlap in a target. Elements that no piece fills are zero.
    """

    sources: Manifest
    targets: Manifest
    pieces: tuple[Piece, ...]

    @cached_property
    def by_source(self) -> dict[str, list[Piece]]:
        """The pieces that come from each source. The list is empty if the source was dropped."""
        return _grouped(self.sources, ((piece.source, piece) for piece in self.pieces))

    @cached_property
    def by_target(self) -> dict[str, list[Piece]]:
        """The pieces that fill each target."""
        return _grouped(self.targets, ((piece.target, piece) for piece in self.pieces))

    def map(self, held: Manifest) -> list[Piece]:
        """Return the pieces, cut to the shards of one rank. Local.

        A piece's `source_box` has coordinates in the whole source tensor, not in the shard, and its
        `target_box` in the whole target tensor.

        Raises:
            PlanError: a name or a global shape is not in `sources`, or a dtype cannot be converted
                to the dtype in `sources`.
        """
        _check_same(held, self.sources)
        return [
            part
            for name, spec in held.items()
            for piece in self.by_source[name]
            if (part := piece.from_source(spec.layout.shard)) is not None
        ]


@dataclass(frozen=True)
class Reads:
    """The boxes of a checkpoint that one loader reads. Pass a `Reads` to `plan_sync` as a target.

    Attributes:
        sources: the whole tensors of which the loader reads boxes.
        boxes: the boxes that the loader reads, by tensor name.
        inexact: the reason why the boxes of a tensor contain more elements than the loader reads,
            by tensor name.
        into: which box of the checkpoint fills which box of the parameters that you passed to
            `record_reads`.
        lost: the reasons why `into` lacks tensors that the loader reads, by tensor name.
        written: the number of elements that the loader writes to each parameter, by parameter name.
            `to_json` leaves out `into`, `lost` and `written`.
    """

    sources: Manifest
    boxes: Boxes
    inexact: Mapping[str, str]
    into: Wiring | None = field(default=None, compare=False)
    lost: Mapping[str, str] = field(default_factory=dict, compare=False)
    written: Mapping[str, int] = field(default_factory=dict, compare=False)

    def lacking(self, held: Boxes) -> list[str]:
        """Return the names of tensors of which the loader reads elements outside `held`.

        The boxes of `held` must not overlap.
        """
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
        """Return a text that `from_json` turns into equal `Reads`."""
        boxes = {n: [(b.offsets, b.sizes) for b in each] for n, each in self.boxes.items()}
        return json.dumps([boxes, dict(self.inexact)], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, checkpoint: Manifest) -> Reads:
        """Return the `Reads` of a text that `to_json` returned. Otherwise raise PlanError.

        `checkpoint` is the manifest that `record_reads` got.
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
    """Run a loader without data and record the boxes that it would read. Local.

    The loader gets meta tensors, and must read them in the caller's thread. Copies of meta tensors
    into parameters are recorded, but not executed. If the loader raises an error, for example
    because meta tensors have no values, the result contains all tensors as whole boxes. `inexact`
    then contains the error.

    Args:
        load: a loader that gets the (name, tensor) pairs of the whole checkpoint, such as the
            `load` of a `Subscriber`.
        checkpoint: the names, dtypes and shapes of the checkpoint.
        into: parameters by name. The attribute `into` of the result says which elements of the
            checkpoint fill which elements of these parameters.
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
        follower.placed.clear()
    else:
        boxes = {
            name: _joined(name, follower.read[name], spec.shape)
            for name, spec in checkpoint.items()
            if name in follower.read
        }
        inexact, lost = follower.inexact, follower.lost
    last = {
        name: _last_written(rows, tuple(parameters[name].shape), lost)
        for name, rows in follower.placed.items()
    }
    count = {name: sum(piece.target_box.numel for piece in rows) for name, rows in last.items()}
    targets = {name: one for name, one in parameters.items() if name in follower.targets}
    placed = (piece for name in targets for piece in merge(last.get(name, ())))
    pieces = tuple(piece for piece in placed if piece.source and piece.source not in lost)
    wiring = Wiring(_whole(checkpoint, checkpoint), describe(targets), pieces)
    return Reads(_whole(checkpoint, boxes), boxes, inexact, wiring, lost, count)


def record_wiring(
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], *manifests: Manifest
) -> Wiring:
    """Run a conversion without data and record where each element goes. Local.

    The conversion may rename, slice, transpose, split, stack, join and drop tensors, in plain
    torch. To pad, the conversion may join tensors from `torch.zeros`, or from `torch.empty` on the
    meta device, to other tensors. The padding is zero in both cases.

    Args:
        convert: a function that gets whole meta tensors by name, and returns the converted tensors.
        manifests: the manifest of the sources, or the manifests of all ranks if each rank has only
            some of the names.

    Raises:
        PlanError: the conversion computes with a tensor, casts it, repeats it or reads its values.
            Also raised if the conversion creates values other than zeros and returns them or
            joins them to a tensor. Also raised if the conversion separates the float8 codes of a
            tensor `NAME` from the scales of their tiles, which are the tensor `NAME_scale_inv`.
            Also raised if manifests differ in a tensor or in the recipe.
    """
    sources, follower = union(manifests), Follower()
    with torch.no_grad(), follower:
        made = dict(convert({name: follower.source(name, sources[name]) for name in sources}))
    pieces = [piece for name, one in made.items() for piece in merge(follower.pieces(name, one))]
    if follower.constant:
        raise PlanError(
            "the conversion creates values other than 0, but a plan does not send them: "
            f"{follower.constant[0]!r} has such values. Pad with zeros, or send the values as a "
            "tensor."
        )
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
            "Convert only by moving elements, or publish without the conversion."
        )
    wiring = Wiring(sources, targets, tuple(pieces))
    for name, spec in sources.items():
        scales = sources.get(name + _SCALES)
        is_codes = spec.dtype.is_floating_point and spec.dtype.itemsize == 1
        if is_codes and scales is not None and len(scales.shape) == len(spec.shape):
            _check_tiles(wiring, name)
    return wiring


def check_wiring(plan: Plan, reader: int, wiring: Wiring | None) -> None:
    """Raise PlanError unless a reader of the plan can load with this wiring, or with None."""
    plan.check_reader(reader)
    wants = plan.wants[reader]
    cut = [name for name, boxes in wants.items() if len(boxes) > 1]
    if cut and wiring is None:
        raise PlanError(
            f"reader {reader} wants several boxes of {len(cut)} tensors, such as {cut[0]!r}. "
            "Pass convert=, the wiring that plan_sync() got for this reader."
        )
    if wiring is None:
        return
    for piece in wiring.pieces:
        read = wiring.sources[piece.source]
        if piece.source not in wants or plan.target[piece.source].shape != read.shape:
            raise PlanError(
                f"reader {reader} does not receive {piece.source!r} with the shape {read.shape}, "
                "which convert= reads. If this wiring was the convert= of announce() or "
                "plan_sync(), drop convert= here."
            )


def filling(checkpoint: Manifest, boxes: Boxes) -> Wiring:
    """Return a wiring to whole tensors of which only the given boxes are filled."""
    whole = _whole(checkpoint, boxes)
    return Wiring(whole, whole, tuple(in_place(name, box) for name in whole for box in boxes[name]))


def union(manifests: Sequence[Manifest]) -> Manifest:
    """Return one manifest of all names with their global shapes.

    Raises:
        PlanError: manifests disagree about a tensor or about the recipe.
    """
    specs: dict[str, TensorSpec] = {}
    for manifest in manifests:
        if not isinstance(manifest, Manifest):
            raise PlanError(f"expected a manifest from describe(); got {shown(manifest)}.")
        for name, spec in manifest.items():
            whole = spec.whole()
            if specs.setdefault(name, whole) != whole:
                raise PlanError(
                    f"{name!r} is {whole.dtype} {whole.shape} on one rank or reader, and "
                    f"{specs[name].dtype} {specs[name].shape} on another. Describe both alike, or "
                    "make a plan for each reader."
                )
    recipes = {manifest.recipe for manifest in manifests}
    if len(recipes) > 1:
        raise PlanError(
            f"ranks or readers have different recipes: {sorted(recipes)}. Use one recipe in a plan."
        )
    return Manifest(tuple(specs.items()), recipes.pop() if recipes else "")


def _check_same(held: Manifest, bound: Manifest) -> None:
    for name, spec in held.items():
        want = bound.get(name)
        if want is None or want.shape != spec.shape or not converts(spec.dtype, want.dtype):
            wanted = "no such tensor" if want is None else f"{want.dtype} {want.shape}"
            raise PlanError(
                f"{name!r} is {spec.dtype} {spec.shape}, but the wiring was recorded for {wanted}. "
                "Record the wiring of these tensors."
            )


def _check_tiles(wiring: Wiring, name: str) -> None:
    """Raise PlanError unless the scale of each tile of `name` goes where the tile's codes go."""
    tiles = wiring.sources[name + _SCALES].shape
    sides = [*map(_side, wiring.sources[name].shape, tiles)]
    for piece in wiring.by_source[name]:
        at, sizes = piece.source_box.offsets, piece.source_box.sizes
        spans = [range(a // s, -(-(a + n) // s)) for a, n, s in zip(at, sizes, sides, strict=True)]
        touched = Shard(tuple(span.start for span in spans), tuple(map(len, spans)))
        starts = zip(piece.dims, piece.target_box.offsets, strict=True)
        # One tile does not show its side, so its place in a dim of the target is not checked.
        ways = [(to, *way) for to, way in enumerate(starts) if way[0] != NEW and tiles[way[0]] > 1]
        # A conversion may give the scales of a target another suffix.
        moved = wiring.by_target.get(piece.target + _SCALES) or wiring.by_source[name + _SCALES]
        parts = (each.from_source(touched) for each in moved if each.source == name + _SCALES)
        if any((at[dim] - start) % sides[dim] for _, dim, start in ways) or not any(
            part.source_box == touched
            and len(part.dims) == len(piece.dims)
            and all(part.target_box.offsets[to] == start // sides[dim] for to, dim, start in ways)
            for part in parts
            if part is not None
        ):
            raise PlanError(
                f"{name}: the conversion to {piece.target!r} separates codes from the scales of "
                f"their tiles of {sides}. It cuts a tile, or changes the dims of the scales. "
                'Publish with encode_weights(form="simulated"), or under the names of the module.'
            )


def _side(size: int, tiles: int) -> int:
    """Return the side of the tiles along a dim, a power of two if one fits."""
    least = max(1, -(-size // max(1, tiles)))
    power = 1 << (least - 1).bit_length()
    return power if -(-size // power) == tiles else least


def _last_written(
    pieces: Sequence[Piece], shape: tuple[int, ...], lost: dict[str, str]
) -> list[Piece]:
    """Return what was written last to each element. Notes in `lost` what was written over."""
    last = []
    for cell, writers in owned_boxes(enumerate(p.target_box for p in pieces), shape)[0]:
        *over, kept = (part for i in writers if (part := pieces[i].to_target(cell)))
        last.append(kept)
        for source in (part.source for part in over if part.source and part != kept):
            lost.setdefault(source, "it is written over")
    return last


def _grouped(names: Iterable[str], pairs: Iterable[tuple[str, Piece]]) -> dict[str, list[Piece]]:
    groups: dict[str, list[Piece]] = {name: [] for name in names}
    for name, piece in pairs:
        groups[name].append(piece)
    return groups


def _whole(checkpoint: Manifest, names: Iterable[str]) -> Manifest:
    tensors = ((name, spec.whole()) for name, spec in checkpoint.items() if name in names)
    return Manifest(tuple(tensors), checkpoint.recipe)


def _joined(name: str, boxes: Iterable[Shard], shape: tuple[int, ...]) -> tuple[Shard, ...]:
    cells = owned_boxes(((0, box) for box in boxes), shape)[0]
    pieces = merge(in_place(name, box) for box, _ in cells)
    return tuple(sorted((p.source_box for p in pieces), key=lambda box: box.offsets))
