"""Float8 in existing models, and in the weights that are sent to an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor, nn

from ..errors import PlanError, UsageError
from ..layout import Layout
from .formats import Tile
from .matmul import matmul
from .quantize import round_trip
from .recipe import Recipe, check_recipe

__all__ = ["Fp8Linear", "convert", "encode_weights"]


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in float8; parameters and their names are those of Linear.

    The weight is rounded in every forward, and backward uses those codes. It is not kept from one
    forward to the next: FSDP2 refills a parameter without a new version number, so nothing tells
    old weights from new ones.
    """

    recipe: Recipe

    def forward(self, input: Tensor) -> Tensor:
        y = matmul(input, self.weight, recipe=self.recipe)
        return y if self.bias is None else y + self.bias


def convert(model: nn.Module, recipe: Recipe, *, only: str | re.Pattern[str]) -> tuple[str, ...]:
    """Let some of a model's linear layers multiply in float8, in place.

    The layers become `Fp8Linear` but stay the same objects, with their parameters, names and
    hooks, so optimizers, FSDP2 (applied afterwards) and weight transfer do not notice. Local.

    Args:
        only: a regular expression; a layer is converted where it is found in the layer's name.

    Returns:
        The names of the converted layers.

    Raises:
        UsageError: the rule matches no linear layer, or is no regular expression.
    """
    check_recipe(recipe)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be an nn.Module; got a {type(model).__name__}")
    pattern = _pattern(only)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and pattern.search(name)
    ]
    if not found:
        linear = [name for name, m in model.named_modules() if type(m) is nn.Linear]
        raise UsageError(
            f"{pattern.pattern!r} matches none of {len(linear)} linear layers; "
            f"they are named like {linear[:3]}"
        )
    for _, module in found:
        layer = cast(Fp8Linear, module)
        layer.__class__ = Fp8Linear
        layer.recipe = recipe
    return tuple(name for name, _ in found)


def encode_weights(
    recipe: Recipe,
    *,
    only: str | re.Pattern[str],
    layouts: Mapping[str, Layout] | None = None,
) -> Callable[[str, Tensor], Mapping[str, Tensor]]:
    """Return the function that rounds a tensor as training does before weight transfer sends it.

    The engine gets ordinary numbers that lie on the float8 grid, so one without float8 kernels
    serves what a float8 trainer computes with, up to the rounding of the transfer dtype. This is
    simulated quantization: no bytes are saved. Local.

    Each rank rounds its own shard, whose tiles are those of the whole only if the shard is cut
    along tiles of `recipe.weights`.

    Args:
        only: found in the names of the weights to round; others, and vectors, pass unchanged.
        layouts: by name, what this rank holds (`primeblocks.layout.layout_of`). Given, a cut
            through a tile is refused; otherwise it is not noticed.

    Raises:
        UsageError: `only` is no regular expression.
        PlanError: a shard of a matching weight is cut through a tile.
    """
    check_recipe(recipe)
    pattern = _pattern(only)
    for name, layout in ({} if layouts is None else layouts).items():
        if pattern.search(name) and len(layout.shape) == 2:
            _check_cut(name, layout, recipe.weights)

    def encode(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        if tensor.ndim != 2 or not pattern.search(name) or not tensor.numel():
            return {name: tensor}
        return {name: round_trip(tensor, recipe.weights)}

    return encode


def _pattern(only: str | re.Pattern[str]) -> re.Pattern[str]:
    if isinstance(only, str | re.Pattern):
        try:
            return re.compile(only)
        except re.error as error:
            raise UsageError(f"only={only!r} is no regular expression: {error}") from error
    raise UsageError(f"only must be one regular expression; got {only!r}. Join names with |.")


def _check_cut(name: str, layout: Layout, tile: Tile) -> None:
    box = layout.shard
    if 0 in box.sizes:
        return
    sides = zip(box.offsets, box.sizes, layout.shape, (tile.rows, tile.columns), strict=True)
    for start, size, whole, side in sides:
        if start % side or (start + size != whole and size % side):
            raise PlanError(
                f"{name}: this rank holds {start}:{start + size} of {whole}, which cuts through "
                f"tiles of {side}. Choose weights=Tile(...) with a side that divides every cut."
            )
