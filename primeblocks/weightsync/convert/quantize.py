"""Quantizing on the way: weights that travel as codes and scales, which a callable computes.

Conversions move elements and compute none. This step stands beside them: it tells what a rank holds
after its shards were encoded, so that conversions and plans can go on with codes and scales.

Names are templates: `{layer}` stands for one part of a name, between dots, `{*head}` for any number
of parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...errors import PlanError, ShapeError
from ...layout import Layout, Shard
from ..manifest import Manifest, TensorSpec

__all__ = ["Quantize", "QuantizeBy"]


@dataclass(frozen=True)
class QuantizeBy:
    """A `Quantize` with the callable that computes: weight -> codes and scales."""

    quantize: Quantize
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]

    def __call__(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Encode one rank's part of a parameter. Raises as `Quantize.apply`."""
        return self.quantize.apply({name: tensor}, self.encode)

    def describe(self, held: Manifest) -> Manifest:
        """Return the manifest of a rank's encoded shards. Raises as `Quantize.describe`."""
        return self.quantize.describe(held)

    def origins(self, held: Manifest) -> dict[str, str]:
        """Return the parameter that each encoded tensor is made of."""
        return self.quantize.origins(held)


@dataclass(frozen=True)
class Quantize:
    """Weights as codes of the same name and shape, and one scale a tile under another name.

    There is no inverse: rounding has none.

    Attributes:
        names: template of the weights.
        scales: template of the scales' names, with the same fields.
        tile: elements that share a scale, along the last dims; a ragged edge has a scale too.
        recipe: fingerprint of how codes and scales are computed, such as `Recipe.fingerprint()`;
            `plan_sync` refuses readers that expect another one.
    """

    names: str
    scales: str
    tile: tuple[int, ...]
    codes_dtype: torch.dtype
    scales_dtype: torch.dtype = torch.float32
    recipe: str = ""

    def __post_init__(self) -> None:
        if _fields_of(self.names) != _fields_of(self.scales) or min(self.tile, default=0) < 1:
            raise PlanError(
                f"needs equal fields and positive tiles; got {self.names!r}, {self.scales!r}, "
                f"tile={self.tile}"
            )

    def describe(self, held: Manifest) -> Manifest:
        """Return the manifest of a rank once its shards are encoded. Local.

        Raises:
            PlanError: nothing matches, or a shard does not hold whole tiles.
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
            raise PlanError(f"{self.names} matches none of {len(held)} names. Correct the template")
        return Manifest(tuple(rows), self.recipe)

    def by(self, encode: Callable[[Tensor], tuple[Tensor, Tensor]]) -> QuantizeBy:
        """Return the `encode` argument of a Publisher."""
        return QuantizeBy(self, encode)

    def apply(
        self, tensors: Mapping[str, Tensor], encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """Encode one rank's local tensors. Local; costs what `encode` does.

        Args:
            encode: from a weight to its codes and scales.

        Raises:
            ShapeError: `encode` returned what was not declared.
        """
        out: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            scales = self._scales_of(name)
            if scales is None:
                out[name] = tensor
                continue
            out[name], out[scales] = encode(tensor)
            tiles = self._counts(tuple(tensor.shape))
            self._check(name, out[name], tuple(tensor.shape), self.codes_dtype)
            self._check(scales, out[scales], tiles, self.scales_dtype)
        return out

    def origins(self, held: Manifest) -> dict[str, str]:
        """Return, by name of codes and scales, the weight that they are made of."""
        made = {name: name for name in held}
        made.update((scales, name) for name in held if (scales := self._scales_of(name)))
        return made

    def _scales_of(self, name: str) -> str | None:
        fields = _match(self.names, name)
        return None if fields is None else _fill(self.scales, fields)

    def _steps(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the elements of a tile along each dim."""
        if len(shape) < len(self.tile):
            raise PlanError(f"shape {shape} has fewer dims than tile {self.tile}")
        return (1,) * (len(shape) - len(self.tile)) + self.tile

    def _counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-n // step) for n, step in zip(shape, self._steps(shape), strict=True))

    def _tiles(self, name: str, layout: Layout) -> Layout:
        box, steps = layout.shard, self._steps(layout.shape)
        ends = [start + size for start, size in zip(box.offsets, box.sizes, strict=True)]
        for start, end, whole, step in zip(box.offsets, ends, layout.shape, steps, strict=True):
            if start % step or (end % step and end != whole):
                raise PlanError(
                    f"{name!r}: {box} cuts through tiles of {self.tile}. Shard at multiples of "
                    "the tile, or encode before sharding."
                )
        starts = tuple(start // step for start, step in zip(box.offsets, steps, strict=True))
        return Layout(self._counts(layout.shape), Shard(starts, self._counts(box.sizes)))

    @staticmethod
    def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise ShapeError(
                f"encode gave {name!r} as {tensor.dtype} {tuple(tensor.shape)}; "
                f"declared was {dtype} {shape}. Match the recipe and the declaration."
            )


def _fields_of(template: str) -> frozenset[str]:
    """Return the names of a template's fields.

    Raises:
        PlanError: a field stands in it twice.
    """
    return frozenset(_parsed(template)[1])


def _match(template: str, name: str) -> dict[str, str] | None:
    """Return the values of a template's fields in a name that fits, or None."""
    found = _parsed(template)[0].fullmatch(name)
    return None if found is None else found.groupdict()


def _fill(template: str, fields: Mapping[str, str]) -> str:
    """Return the name that a template makes of fields."""
    _, names, text = _parsed(template)
    filled = (fields[name] + after for name, after in zip(names, text[1:], strict=True))
    return text[0] + "".join(filled)


@cache
def _parsed(template: str) -> tuple[re.Pattern[str], tuple[str, ...], tuple[str, ...]]:
    """Return a template's pattern, its fields in order, and the text around them."""
    text = re.split(r"\{(\*?[a-z_]+)\}", template)
    fields = tuple(field.removeprefix("*") for field in text[1::2])
    if len(set(fields)) != len(fields):
        raise PlanError(f"a field stands twice in {template!r}")
    pattern = re.escape(text[0])
    for written, field, after in zip(text[1::2], fields, text[2::2], strict=True):
        values = ".+" if written.startswith("*") else r"[^.]+"
        pattern += f"(?P<{field}>{values}){re.escape(after)}"
    return re.compile(pattern), fields, tuple(text[::2])
