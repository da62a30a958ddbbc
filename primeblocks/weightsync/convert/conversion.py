"""Conversions between the names and shapes that trainer, checkpoint and engine give weights.

Elements are moved, never computed, so every conversion is exact and has a way back. What moves is
known as boxes before anything moves: a shard goes straight to where it belongs, through changes of
name and shape, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ...errors import PlanError
from ...layout import Layout, Shard
from ..manifest import Manifest, TensorSpec, converts, describe
from ..plan import owned_boxes
from .pieces import Piece

__all__ = ["Wiring", "union"]


@dataclass(frozen=True)
class Wiring:
    """A conversion bound to tensors: each box of a source, and the box of a target it fills.

    Pieces overlap on neither side. Elements of a target that no piece fills are padding, zero; on
    the way back they are those that were dropped or cropped, and have to be given (`lossy`).
    """

    sources: Manifest
    targets: Manifest
    pieces: tuple[Piece, ...]
    lossy: bool = False

    def inverse(self) -> Wiring:
        """Return the way back, exact whatever the rules."""
        pieces = tuple(piece.inverse() for piece in self.pieces)
        return Wiring(self.targets, self.sources, pieces, not self.lossy)

    @cached_property
    def by_source(self) -> dict[str, list[Piece]]:
        """The pieces that each source fills; none where it was dropped."""
        return _grouped(self.sources, ((piece.source, piece) for piece in self.pieces))

    @cached_property
    def by_target(self) -> dict[str, list[Piece]]:
        """The pieces that fill each target."""
        return _grouped(self.targets, ((piece.target, piece) for piece in self.pieces))

    @cached_property
    def dropped(self) -> tuple[str, ...]:
        """Sources of which no element arrives."""
        empty = (name for name, pieces in self.by_source.items() if not pieces)
        return tuple(name for name in empty if 0 not in self.sources[name].shape)

    @cached_property
    def unfilled(self) -> dict[str, list[Shard]]:
        """Boxes of targets that nothing fills."""
        holes = {}
        for name, pieces in self.by_target.items():
            shape = self.targets[name].shape
            if sum(piece.target_box.numel for piece in pieces) != prod(shape):
                holes[name] = owned_boxes([(0, piece.target_box) for piece in pieces], shape)[1]
        return holes

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

    def move(
        self, tensors: Mapping[str, Tensor], *, fill: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return whole targets from whole sources, in new memory. Local; copies each element once.

        Args:
            fill: targets to start from, by name, where something is `unfilled`.

        Raises:
            PlanError: a source is missing, is sharded or has another shape; or a target needs
                filling and is not in `fill`.
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
        fill = {} if fill is None else fill
        needed = [name for name in self.unfilled if self.lossy and name not in fill]
        if needed:
            raise PlanError(
                f"{len(needed)} tensors were dropped or cropped, first {needed[0]!r}: "
                f"{self.unfilled[needed[0]][0]}. Pass them in fill=."
            )
        return {name: self._made(name, tensors, fill.get(name)) for name in self.targets}

    def _made(self, name: str, tensors: Mapping[str, Tensor], start: Tensor | None) -> Tensor:
        spec, pieces = self.targets[name], self.by_target[name]
        if start is None:
            device = tensors[pieces[0].source].device if pieces else None
            made = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        elif (tuple(start.shape), start.dtype) != (spec.shape, spec.dtype):
            found = f"{start.dtype} {tuple(start.shape)}"
            raise PlanError(f"{name!r} is {spec.dtype} {spec.shape}; fill has {found}")
        else:
            made = start.clone()
        for piece in pieces:
            source = self.sources[piece.source].layout.shard
            made[piece.target_box.slices].copy_(piece.view(tensors[piece.source], source))
        return made


def union(manifests: Sequence[Manifest]) -> Manifest:
    """Return all names with their global shapes."""
    specs: dict[str, TensorSpec] = {}
    for manifest in manifests:
        for name, spec in manifest.items():
            whole = spec
            if not spec.layout.is_whole:
                whole = TensorSpec(spec.dtype, Layout.whole(spec.shape))
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
