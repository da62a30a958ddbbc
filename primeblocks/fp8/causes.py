"""Known causes that turn one weight into other codes, named if they give the engine's bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from .checkpoint import powers_of_two
from .quantize import Quantized, Quotient, Scale, Tile, quantize
from .recipe import Recipe

__all__ = [
    "can_quantize",
    "explain_codes",
    "explain_plain",
    "explain_simulated",
    "is_same",
]

_MASTER, _EXPORT, _TWICE = "float32", "bfloat16", "codes"
_SIDES = (1, 16, 32, 64, 128, 256, 512)
# Rounding to bfloat16 moves a tile's largest value, and so its scale, by at most 2**-9 of it.
_CLOSE = 2.0**-8
_SCALES = {"float32": "float32", "ue8m0": "UE8M0"}
_SOURCES = {
    _MASTER: "quantized from the float32 master, the recipe from the bfloat16 export",
    _EXPORT: "quantized from the bfloat16 export, the recipe from the float32 master",
    _TWICE: "quantized a second time, from codes times scales in bfloat16",
}


class _Way(NamedTuple):
    """One way to quantize. A way that differs from the recipe's is a possible cause."""

    source: str
    scale: Scale
    quotient: Quotient
    tile: Tile

    def make(self, weight: Tensor, recipe: Recipe) -> Quantized:
        x = weight.bfloat16() if self.source == _EXPORT else weight
        if self.source == _TWICE:
            x = recipe.quantize_weight(weight).dequantize().bfloat16()
        return quantize(x, self.tile, scale=self.scale, quotient=self.quotient, nonfinite="nan")

    def against(self, usual: _Way) -> str:
        """Return the differences from the recipe's way, in words. Pure."""
        words = [_SOURCES[self.source]] if self.source != usual.source else []
        if self.scale != usual.scale:
            words.append(f"{_SCALES[self.scale]} scales, the recipe's are {_SCALES[usual.scale]}")
        if self.quotient != usual.quotient:
            words.append(f"quotient {self.quotient!r}, the recipe's is {usual.quotient!r}")
        if self.tile != usual.tile:
            words.append(f"tiles of {_sides(self.tile)}, the recipe's are {_sides(usual.tile)}")
        return ", and ".join(words)


def explain_codes(weight: Tensor, codes: Tensor, scales: Tensor, recipe: Recipe) -> str:
    """Return the reason why an engine's codes and scales differ from the recipe's. Local.

    Names a cause if it gives the engine's bits. If several causes with equally few changes do so,
    names all of them.
    """
    expected = recipe.quantize_weight(weight)
    shape = expected.scales.shape
    tiles = []
    if scales.ndim == len(shape) and scales.shape[:-2] == shape[:-2] and weight.numel():
        tiles = _tiles(weight, scales, recipe.weights)
    if not tiles:
        return f"scales of shape {list(scales.shape)} where the recipe has {list(shape)}"

    def fits(way: _Way) -> bool:
        # Compare whole tiles of one expert first. Most ways end here.
        rows = math.lcm(way.tile.rows, recipe.weights.rows)
        first: tuple[int | slice, ...] = (*(0,) * (weight.ndim - 2), slice(rows))
        top: tuple[int | slice, ...] = (*first[:-1], slice(rows // way.tile.rows))
        made = way.make(weight[first], recipe)
        if not (is_same(made.codes, codes[first]) and is_same(made.scales, scales[top])):
            return False
        made = way.make(weight, recipe)
        return is_same(made.codes, codes) and is_same(made.scales, scales)

    numbers = _count(expected.codes, codes, "codes")
    if shape == scales.shape:
        numbers += f" and {_count(expected.scales, scales, 'scales')} differ"
    else:
        numbers += f" differ, scales are {list(scales.shape[-2:])} for {list(shape[-2:])}"
    if causes := _causes(weight, recipe, tiles, fits):
        return f"{_either(causes)} ({numbers})"
    held = Quantized(codes, scales, tiles[0])
    return "; ".join([f"other values: {numbers}", *_facts(expected, held, recipe.scale)])


def explain_simulated(weight: Tensor, held: Tensor, recipe: Recipe, *, unquantized: str) -> str:
    """Return the reason why plain numbers differ from a recipe's float8 grid. Local.

    Args:
        unquantized: the reason to give for numbers that equal the weight.
    """

    def fits(way: _Way) -> bool:
        return is_same(way.make(weight, recipe).dequantize().to(held.dtype), held)

    causes = _causes(weight, recipe, [recipe.weights], fits)
    causes = [f"on the float8 grid, but {cause}" for cause in causes]
    if _is_rounding(weight, held):
        causes.insert(0, unquantized)
    numbers = _difference(recipe.quantize_weight(weight).dequantize(), held)
    return f"{_either(causes)} ({numbers})" if causes else f"other values: {numbers}"


def explain_plain(weight: Tensor, held: Tensor, recipe: Recipe) -> str:
    """Return the reason why a tensor that is not quantized differs from the engine's. Local."""
    causes = []
    if _is_rounding(weight, held):
        causes.append(f"the bfloat16 rounding, in {held.dtype}")
    if can_quantize(weight, recipe):
        rounded = recipe.quantize_weight(weight).dequantize()
        if is_same(rounded.to(held.dtype), held):
            causes.append("rounded to the float8 grid, though the rule does not name it")
    numbers = _difference(weight, held)
    return f"{_either(causes)} ({numbers})" if causes else f"other values: {numbers}"


def is_same(some: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal bits. Local."""
    if some.dtype != other.dtype or some.shape != other.shape:
        return False
    return not bool(_unlike(some, other).any())


def _is_rounding(weight: Tensor, held: Tensor) -> bool:
    """Return whether an engine's numbers are the weight, cast directly or via bfloat16. Local."""
    return any(is_same(each.to(held.dtype), held) for each in (weight, weight.bfloat16()))


def can_quantize(weight: Tensor, recipe: Recipe) -> bool:
    """Return whether a tensor is a matrix of the precision that a recipe quantizes. Local."""
    is_master = weight.dtype in (torch.float32, torch.float64)
    return (
        weight.ndim > 1 and weight.is_floating_point() and (is_master or recipe.source == _EXPORT)
    )


def _causes(
    weight: Tensor, recipe: Recipe, tiles: list[Tile], fits: Callable[[_Way], bool]
) -> list[str]:
    """Return the ways with the fewest changes that fit, in words."""
    usual = _Way(recipe.source, recipe.scale, recipe.quotient, recipe.weights)
    is_master = weight.dtype in (torch.float32, torch.float64)
    sources = (_EXPORT, _MASTER, _TWICE) if is_master else (_EXPORT, _TWICE)
    levels: dict[int, list[_Way]] = {}
    for way in itertools.starmap(
        _Way, itertools.product(sources, get_args(Scale), get_args(Quotient), tiles)
    ):
        # All quotients by a power of two are equal.
        if way.scale == "float32" or way.quotient == usual.quotient:
            changes = sum(a != b for a, b in zip(way, usual, strict=True))
            levels.setdefault(changes, []).append(way)
    for changes in sorted(levels.keys() - {0}):
        if found := [way for way in levels[changes] if fits(way)]:
            return [way.against(usual) for way in found]
    return []


def _tiles(weight: Tensor, scales: Tensor, usual: Tile) -> list[Tile]:
    """Return the usual tile and common tiles that give the same number of scales."""
    rows, columns = weight.shape[-2:]
    every = itertools.starmap(
        Tile, itertools.product(_sides_of(rows, usual.rows), _sides_of(columns, usual.columns))
    )
    return [tile for tile in every if tile.grid(rows, columns) == tuple(scales.shape[-2:])]


def _sides_of(size: int, usual: int) -> list[int]:
    """Return sides of tiles that cut a dim differently."""
    smaller = [side for side in _SIDES if side < size and side != usual]
    if usual >= size:
        return [usual, *smaller]
    return [usual, *smaller, next((side for side in _SIDES if side >= size), size)]


def _facts(expected: Quantized, held: Quantized, kind: Scale) -> Iterator[str]:
    """Yield facts about codes without a known cause."""
    powers = bool(powers_of_two(held.scales).all())
    if kind == "float32" and powers and not powers_of_two(expected.scales).all():
        yield "scales are all powers of two (UE8M0), the recipe's are float32"
    if kind == "ue8m0" and not powers:
        yield "scales are float32, the recipe's are powers of two (UE8M0)"
    mine, theirs = expected.dequantize(), held.dequantize()
    if torch.equal(mine, theirs):
        yield "code times scale is the same"
        return
    yield f"largest difference {_largest(mine, theirs)}"
    if held.tile == expected.tile and kind == "float32":
        steps = (_ordered(expected.codes) - _ordered(held.codes)).abs().max()
        apart = ((held.scales - expected.scales) / expected.scales).abs().max()
        if steps <= 1 and apart <= _CLOSE:
            yield (
                "no code is off by more than a step: another rounding of the weight, or another "
                "version of it"
            )


def _ordered(codes: Tensor) -> Tensor:
    """Return codes as integers in the order of their values. Neighbours differ by one."""
    bits = codes.view(torch.int8).short()
    return torch.where(bits < 0, -(bits & 0x7F), bits)


def _difference(expected: Tensor, held: Tensor) -> str:
    cast = expected.to(held.dtype)
    largest = _largest(cast, held)
    return f"{_count(cast, held, 'values')} differ, largest difference {largest}"


def _count(expected: Tensor, held: Tensor, what: str) -> str:
    return f"{int(_unlike(expected, held).sum())} of {held.numel()} {what}"


def _largest(expected: Tensor, held: Tensor) -> str:
    difference, scale = (expected.float() - held.float()).abs().max(), expected.float().abs().max()
    if scale == 0:
        return f"{float(difference):.1e}, where all are zero"
    return f"{float(difference / scale):.1e} of the largest value"


def _unlike(some: Tensor, other: Tensor) -> Tensor:
    if not some.is_floating_point():
        return some != other
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[some.element_size()]
    return some.view(bits) != other.view(bits)


def _either(causes: list[str]) -> str:
    if len(causes) == 1:
        return causes[0]
    return f"{', or '.join(causes)}; the bits are the same"


def _sides(tile: Tile) -> str:
    return f"{tile.rows} x {tile.columns}"
