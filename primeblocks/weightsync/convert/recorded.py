"""The boxes of a checkpoint that a load reads, recorded from a run that reads nothing.

A loader cuts, turns, joins and copies checkpoint tensors in ways of its own. Here it runs once on
tensors without memory. torch keeps the strides of every view of them, so an element that ends in a
parameter is known by its place in its checkpoint tensor, and no kind of view has a rule of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...layout import Layout, Shard
from ..cover import owned_boxes
from ..manifest import Manifest, TensorSpec, as_plan_error, box_of
from ..plan import Boxes
from .conversion import Wiring
from .followed import Follower
from .pieces import Piece, merge

__all__ = ["Reads", "filling", "record_reads"]


@dataclass(frozen=True)
class Reads:
    """The boxes that one loader reads of a checkpoint.

    Attributes:
        wiring: a target for `plan_sync`: whole tensors, of which these boxes alone are filled.
        inexact: name -> why its boxes hold more than what is read.
    """

    wiring: Wiring
    inexact: Mapping[str, str]

    @cached_property
    def bytes(self) -> int:
        """The bytes of all boxes."""
        return sum(
            piece.source_box.numel * self.wiring.sources[piece.source].dtype.itemsize
            for piece in self.wiring.pieces
        )

    @cached_property
    def boxes(self) -> Boxes:
        """The boxes by name; a tensor of which nothing is read is not there."""
        pieces = self.wiring.by_source.items()
        return {name: tuple(piece.source_box for piece in each) for name, each in pieces}

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
            boxes = {n: tuple(box_of(*box) for box in each) for n, each in rows.items()}
            return cls(filling(checkpoint, boxes), inexact)


def record_reads(
    load: Callable[[Iterable[tuple[str, Tensor]]], object], checkpoint: Manifest
) -> Reads:
    """Run a loader without data and record what it would read. Local; parameters keep their values.

    The loader gets meta tensors. What it would write of them to a parameter is not written; what it
    writes besides, such as zeros, is. It has to read in this thread. Where it fails on tensors
    without values, all tensors are read whole, and `inexact` says why.

    Args:
        load: takes every tensor of the checkpoint by name, as `Subscriber` gives them.
    """
    follower, name = Follower(), ""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal name
        for name, spec in checkpoint.items():
            yield name, follower.source(name, spec)

    try:
        with torch.no_grad(), follower:
            load(tensors())
    except Exception as error:  # A loader may raise anything where it finds no values.
        why = f"the loader fails without values, at {name!r}: {type(error).__name__}: {error}"
        whole = {name: (Layout.whole(spec.shape).shard,) for name, spec in checkpoint.items()}
        return Reads(filling(checkpoint, whole), dict.fromkeys(checkpoint, why))
    boxes = {
        name: _joined(name, follower.read[name], spec.shape)
        for name, spec in checkpoint.items()
        if name in follower.read
    }
    return Reads(filling(checkpoint, boxes), follower.inexact)


def filling(checkpoint: Manifest, boxes: Boxes) -> Wiring:
    """Return the wiring of one reader: whole tensors, of which only these boxes are filled."""
    tensors = tuple(
        (name, TensorSpec(spec.dtype, Layout.whole(spec.shape)))
        for name, spec in checkpoint.items()
        if name in boxes
    )
    whole = Manifest(tensors, checkpoint.recipe)
    return Wiring(whole, whole, tuple(_piece(n, box) for n in whole for box in boxes[n]))


def _piece(name: str, box: Shard) -> Piece:
    return Piece(name, box, name, box, tuple(range(len(box.sizes))))


def _joined(name: str, boxes: Iterable[Shard], shape: tuple[int, ...]) -> tuple[Shard, ...]:
    """Return disjoint boxes of the same elements, few of them."""
    cells = owned_boxes(((0, box) for box in boxes), shape)[0]
    pieces = merge(_piece(name, box) for box, _ in cells)
    return tuple(sorted((p.source_box for p in pieces), key=lambda box: box.offsets))
