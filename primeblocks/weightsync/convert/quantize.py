"""Quantizing on the way: a callable turns weights into codes and scales, which travel instead.

Conversions only move elements. `Quantize` describes what a rank holds after its shards were
encoded, so that conversions and plans can work with codes and scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import PlanError, ShapeError, UsageError
from ...layout import Layout, Shard
from ..manifest import Manifest, TensorSpec

__all__ = ["Quantize"]


@dataclass(frozen=True)
class Quantize:
    r"""Sends weights as codes of the same name and shape, with one scale per tile.

    It cannot be inverted, because rounding loses bits.

    Attributes:
        names: a regular expression that matches the full names of the weights.
        scales: the names of their scales, in which `\1` is the first group of `names`.
        tile: the shape of a tile, along the last dims. A tile at a ragged edge has a scale too.
        codes_dtype: the dtype of the codes.
        scales_dtype: the dtype of the scales.
        recipe: the fingerprint of how codes and scales are computed, as `Recipe.fingerprint()`
            returns it. `plan_sync` refuses readers that expect another recipe.
        encode: turns a weight into its codes and scales. See `by`.
    """

    names: str
    scales: str
    tile: tuple[int, ...]
    codes_dtype: torch.dtype
    scales_dtype: torch.dtype = torch.float32
    recipe: str = ""
    encode: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        if min(self.tile, default=0) < 1:
            raise PlanError(
                f"Quantize needs a tile of positive sizes; got tile={self.tile}. "
                "For example, pass (128, 128)."
            )

    def describe(self, held: Manifest) -> Manifest:
        """Return the manifest of a rank once its shards are encoded. Local.

        Raises:
            PlanError: `names` matches no weight, or a shard does not hold whole tiles.
        """
        rows: list[tuple[str, TensorSpec]] = []
        for name, spec in held.items():
            scales = self._scales_of(name)
            if scales is None:
                rows.append((name, spec))
            else:
                rows.append((name, TensorSpec(self.codes_dtype, spec.layout)))
                rows.append((scales, TensorSpec(self.scales_dtype, self._tiles(name, spec.layout))))
        if len(rows) == len(held):
            raise PlanError(
                f"names={self.names!r} matches none of {len(held)} names. Correct the expression."
            )
        return Manifest(tuple(rows), self.recipe)

    def by(self, encode: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Quantize:
        """Return this `Quantize` with a function that computes: the `encode` of a `Publisher`.

        Args:
            encode: takes one rank's part of a weight, and returns its codes and scales.
        """
        return replace(self, encode=encode)

    def __call__(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Encode one rank's part of a parameter. Local: costs what `encode` costs.

        Raises:
            UsageError: no `encode` was given. Call `by` first.
            ShapeError: `encode` returned another shape or dtype than declared.
        """
        scales = self._scales_of(name)
        if scales is None:
            return {name: tensor}
        if self.encode is None:
            raise UsageError(f"nothing encodes {name!r}. Pass Quantize(...).by(encode).")
        out = dict(zip((name, scales), self.encode(tensor), strict=True))
        self._check(name, out[name], tuple(tensor.shape), self.codes_dtype)
        self._check(scales, out[scales], self._counts(tuple(tensor.shape)), self.scales_dtype)
        return out

    def origins(self, held: Manifest) -> dict[str, str]:
        """Return, for each name of codes or scales, the name of the weight they are made of."""
        made = {name: name for name in held}
        made.update((scales, name) for name in held if (scales := self._scales_of(name)))
        return made

    def _scales_of(self, name: str) -> str | None:
        try:
            found = re.fullmatch(self.names, name)
            return None if found is None else found.expand(self.scales)
        except (re.error, IndexError) as error:
            raise PlanError(
                f"names={self.names!r} with scales={self.scales!r} is no substitution of names: "
                f"{error}. In scales=, refer to a group of names=."
            ) from None

    def _steps(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the elements of a tile along each dim."""
        if len(shape) < len(self.tile):
            raise PlanError(
                f"shape {shape} has fewer dims than tile {self.tile}. Exclude it in names=."
            )
        return (1,) * (len(shape) - len(self.tile)) + self.tile

    def _counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-n // step) for n, step in zip(shape, self._steps(shape), strict=True))

    def _tiles(self, name: str, layout: Layout) -> Layout:
        box, steps = layout.shard, self._steps(layout.shape)
        ends = [start + size for start, size in zip(box.offsets, box.sizes, strict=True)]
        for start, end, whole, step in zip(box.offsets, ends, layout.shape, steps, strict=True):
            if start % step or (end % step and end != whole):
                raise PlanError(
                    f"{name!r}: {box} cuts through tiles of {self.tile}. Shard the weight at "
                    "multiples of the tile, or encode the weight before you shard it."
                )
        starts = tuple(start // step for start, step in zip(box.offsets, steps, strict=True))
        return Layout(self._counts(layout.shape), Shard(starts, self._counts(box.sizes)))

    @staticmethod
    def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise ShapeError(
                f"encode returned {name!r} as {tensor.dtype} {tuple(tensor.shape)}; Quantize "
                f"declares {dtype} {shape}. Make both equal."
            )
