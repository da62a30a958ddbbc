"""Float8 in existing models: linear layers, and experts over grouped rows."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..errors import UnsupportedError, UsageError
from .matmul import grouped_matmul, matmul
from .recipe import Recipe, check_recipe
from .rules import Expression, choose

if TYPE_CHECKING:
    from .cache import WeightCache

__all__ = ["Fp8GroupedMm", "Fp8Linear", "convert", "converted", "plain_name"]


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in float8; parameters and their names are those of Linear.

    The weight is rounded in every forward, and backward uses those codes, unless a `WeightCache`
    keeps them from one forward to the next.
    """

    recipe: Recipe
    cache: WeightCache | None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        codes = None if self.cache is None else self.cache.codes(self, "weight", weight)
        y = matmul(input, weight, recipe=self.recipe, codes=codes)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Fp8GroupedMm:
    """The grouped product of a module of experts, in float8: its `grouped_mm`.

    Called as `grouped_mm(name, tokens, weight, offsets)`, where `name` is the weight's in the
    module. See `grouped_matmul`.
    """

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self._module, self.recipe = [module], recipe  # In a list: no submodule, no second name.
        self.cache: WeightCache | None = None

    def __call__(self, name: str, tokens: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        (module,) = self._module
        codes = None if self.cache is None else self.cache.codes(module, name, weight)
        return grouped_matmul(tokens, weight, offsets, recipe=self.recipe, codes=codes)


def convert(
    model: nn.Module,
    recipe: Recipe,
    *,
    only: Expression,
    exclude: Expression | None = None,
) -> tuple[str, ...]:
    """Let some of a model's linear layers and experts multiply in float8, in place.

    The layers become `Fp8Linear` but stay the same objects, with their parameters, names and
    hooks, so optimizers, FSDP2 (applied afterwards) and weight transfer do not notice. A module of
    experts is converted through the seam that it declares, an attribute `grouped_mm`: those of
    `primeblocks.parallel` do; for others call the `convert` of an adapter, such as
    `primeblocks.fp8.adapters.transformers`. Local.

    Args:
        only: a regular expression that names whole parts of dotted names; a layer is converted if
            it, or what it lies in, is named.
        exclude: of the same kind: layers that are not.

    Returns:
        The names of the converted layers.

    Raises:
        UsageError: a rule matches nothing, or something by accident, or is no regular expression.
        UnsupportedError: experts without a seam are named.
    """
    check_recipe(recipe)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be an nn.Module; got a {type(model).__name__}")
    layers = {plain_name(name): m for name, m in model.named_modules() if _multiplies(m)}
    chosen = choose(layers, only=only, exclude=exclude, among="linear layers and experts")
    for name in chosen:
        if not isinstance(layers[name], nn.Linear) and not hasattr(layers[name], "grouped_mm"):
            raise UnsupportedError(
                f"{name or 'the model'} is a {type(layers[name]).__name__}, which has no seam for "
                "grouped products. Call convert of primeblocks.fp8.adapters.transformers or "
                f".torchtitan, or exclude={re.escape(name.rpartition('.')[2]) + '$'!r}."
            )
    going_around = {
        id(layer)
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        for layer in (module.linear1, module.linear2)
    }
    for name in chosen:
        layer = layers[name]
        if (
            "forward" in vars(layer)
            or isinstance(layer, LazyModuleMixin)
            or id(layer) in going_around
        ):
            raise UnsupportedError(
                f"{name or 'the model'} may not multiply by its own forward: it was given another "
                "one, as accelerate's hooks do, has no shape yet, or lies in a "
                "TransformerEncoderLayer. Convert before hooks, after a first call, or exclude it."
            )
    for name in chosen:
        _convert(layers[name], recipe)
    return chosen


def plain_name(name: str) -> str:
    """Return a module's name as it is without wrappers for compilation and checkpoints. Pure."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def converted(model: nn.Module) -> Iterator[tuple[nn.Module, Any, str, Tensor]]:
    """Yield (module, its float8 product, parameter's name, parameter) of a converted model."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            yield module, module, "weight", module.weight
        elif isinstance(product := getattr(module, "grouped_mm", None), Fp8GroupedMm):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    yield module, product, name, parameter


def _multiplies(module: nn.Module) -> bool:
    """Whether it is a linear layer, or one of experts: matrices stacked in one parameter."""
    if isinstance(module, nn.Linear):
        plain = type(module).forward is nn.Linear.forward or isinstance(module, Fp8Linear)
        # That of nn.MultiheadAttention, which multiplies by its weight itself.
        return plain and not isinstance(module, NonDynamicallyQuantizableLinear)
    stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    return hasattr(module, "grouped_mm") or len(stacked) > 1


def _convert(module: nn.Module, recipe: Recipe) -> None:
    if isinstance(module, nn.Linear):
        layer = cast(Fp8Linear, module)
        layer.__class__ = _float8(type(module))  # type: ignore[arg-type]
        layer.recipe, layer.cache = recipe, None
    else:
        cast(Any, module).grouped_mm = Fp8GroupedMm(module, recipe)


@functools.cache
def _float8(linear: type[nn.Linear]) -> type[Fp8Linear]:
    """Return the class that a layer gets: its own too, if that is a host's."""
    if issubclass(linear, Fp8Linear):
        return linear
    return (
        Fp8Linear if linear is nn.Linear else type(f"Fp8{linear.__name__}", (Fp8Linear, linear), {})
    )
