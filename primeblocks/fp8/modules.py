"""Float8 in existing models: linear layers, experts, and a cache of weight codes.

`convert` changes modules in place. `WeightCache` keeps the codes of their weights. An entry is
valid while four facts about the parameter stay the same: its version counter, its memory address,
its dtype and its recipe. Every step of a torch optimizer, and every load, drops all entries.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import UnsupportedError, UsageError
from ..groups import outside_graphs
from ..layout import local_part
from .matmul import WeightCodes, grouped_matmul, matmul, quantize_both_ways
from .recipe import Recipe, check_recipe
from .rules import Expression, choose

__all__ = ["Fp8GroupedMm", "Fp8Linear", "WeightCache", "convert", "modules_of"]


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in float8, with parameters and names as in `nn.Linear`.

    Without a `WeightCache`, every forward pass quantizes the weight. The weight's codes for the
    backward pass are made together with the codes for forward (see `quantize_both_ways`).
    """

    recipe: Recipe
    cache: WeightCache | None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        codes = None if self.cache is None else self.cache.codes(self, "weight", weight)
        y = matmul(input, weight, recipe=self.recipe, codes=codes)
        return y if self.bias is None else y + self.bias.to(y.dtype)


_PRODUCTS = nn.Linear.forward, Fp8Linear.forward


class Fp8GroupedMm:
    """A float8 product of experts, for the attribute `grouped_mm` of a module of experts.

    The module calls `grouped_mm(name, tokens, weight, offsets)`, where `name` is the name of the
    weight in the module. See `grouped_matmul`.
    """

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self._module, self.recipe = module, recipe
        self.cache: WeightCache | None = None

    def __call__(self, name: str, tokens: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        codes = None if self.cache is None else self.cache.codes(self._module, name, weight)
        return grouped_matmul(tokens, weight, offsets, recipe=self.recipe, codes=codes)


def convert(
    model: nn.Module,
    recipe: Recipe,
    *,
    only: Expression,
    exclude: Expression | None = None,
) -> tuple[str, ...]:
    """Convert some linear layers and experts of a model to float8 products, in place. Local.

    Linear layers become `Fp8Linear`. Converted modules stay the same objects, with their
    parameters, names and hooks, so that optimizers and weight transfer keep working. Apply FSDP2
    after `convert`. A module of experts must have an attribute `grouped_mm`. The experts of
    `primeblocks.parallel` have this attribute. For experts without `grouped_mm`, call the `convert`
    of an adapter, such as `primeblocks.fp8.adapters.transformers`.

    Args:
        only: a regular expression that matches whole parts of dotted names. A layer is converted if
            `only` matches the name of the layer or of a module that contains the layer.
        exclude: a regular expression for layers that stay unchanged.

    Returns:
        The names of the converted layers.

    Raises:
        UsageError: `only` or `exclude` does not match any layer, matches only a fragment between
            the dots of a name, or is not a regular expression.
        UnsupportedError: a chosen module of experts does not have `grouped_mm`. Also raised if a
            chosen linear layer is lazy, has a replaced `forward`, is of a class that overrides
            `forward`, or is in an `nn.TransformerEncoderLayer`.
    """
    check_recipe(recipe)
    layers = {name: module for name, module in modules_of(model) if _multiplies(module)}
    chosen = choose(layers, only=only, exclude=exclude, among="linear layers and experts")
    for name in chosen:
        if not isinstance(layers[name], nn.Linear) and not hasattr(layers[name], "grouped_mm"):
            raise UnsupportedError(
                f"{name or 'the model'} is a {type(layers[name]).__name__}, which has no "
                "attribute grouped_mm for grouped products. Call convert of "
                "primeblocks.fp8.adapters.transformers or .torchtitan, or "
                f"exclude={re.escape(name.rpartition('.')[2]) + '$'!r}."
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
            or (isinstance(layer, nn.Linear) and type(layer).forward not in _PRODUCTS)
            or isinstance(layer, LazyModuleMixin)
            or id(layer) in going_around
        ):
            raise UnsupportedError(
                f"{name or 'the model'} may not multiply by nn.Linear's forward. Its class "
                f"{type(layer).__name__} overrides forward, its forward was replaced (as "
                "accelerate's hooks do), it has no shape yet, or it is inside a "
                "TransformerEncoderLayer. Convert it before you add hooks, or after its first "
                "call, or leave it out with exclude=."
            )
    for name in chosen:
        _convert(layers[name], recipe)
    return chosen


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name without the wrappers of compilation and checkpoints, module). Pure."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model must be an nn.Module; got a {type(model).__name__}. Pass the whole model, and "
            "choose its layers with only=."
        )
    for name, module in model.named_modules():
        yield name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""), module


def _converted(model: nn.Module) -> Iterator[tuple[nn.Module, Any, str, Tensor]]:
    """Yield (module, its float8 product, parameter's name, parameter) of a converted model."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            yield module, module, "weight", module.weight
        elif isinstance(product := getattr(module, "grouped_mm", None), Fp8GroupedMm):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    yield module, product, name, parameter


class WeightCache:
    """A cache of the float8 codes of a converted model's weights.

    The codes of a weight are computed once per optimizer step, for all micro-batches and
    recomputations. The cache drops all codes after each step of any torch optimizer of the process,
    and when a converted module loads a state dict. If a weight is written in place or moves to
    another address, the cache drops the codes of this weight.

    The cache does not notice a write that leaves a tensor's version counter unchanged. Call
    `advance()` after a write to `weight.data`, such as a merge of adapters by PEFT, and after
    `torch._foreach_*` on a DTensor.

    The cache keeps codes of whole weights, also under FSDP2. The codes take one byte per weight
    value, or two bytes if tiles have one row or the kernel needs a copy of transposed codes.

    Args:
        model: a converted model. If you shard the model, shard it before this call.
        optimizers: every optimizer that updates the converted weights. Without optimizers, all
            converted weights must be frozen.

    Raises:
        UsageError: the model does not have a converted layer. Also raised if a weight
            requires gradients but is in none of `optimizers`, so that the cache would not notice
            changes of this weight.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        if not isinstance(model, nn.Module) or not all(
            hasattr(optimizer, "param_groups") for optimizer in optimizers
        ):
            raise UsageError(
                "WeightCache needs a model and its optimizers; got "
                f"{[type(one).__name__ for one in (model, *optimizers)]}."
            )
        self._kept: dict[tuple[nn.Module, str, torch.Size], _Entry] = {}
        self._watched: dict[tuple[nn.Module, str], tuple[Any, Tensor]] = {}
        self.roundings = 0
        updated = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for module, product, name, parameter in _converted(model):
            if parameter.requires_grad and id(parameter) not in updated:
                raise UsageError(
                    f"{name} of a {type(module).__name__} needs gradients, but is in none of the "
                    f"{len(optimizers)} optimizers, so the cache would not notice its changes. "
                    "Call WeightCache(model, optimizer) after fully_shard, with FSDP2's weights "
                    "resharded (model.reshard()), or do not use a cache."
                )
            self._watched[module, name] = product, parameter
        if not self._watched:
            raise UsageError("no layer of the model is converted. Call convert first.")
        this = weakref.ref(self)

        def changed(*_: object) -> None:
            if (cache := this()) is not None:
                cache.advance()

        modules = {module for module, _ in self._watched}
        self._hooks = [register_optimizer_step_post_hook(changed)]
        self._hooks += [module.register_load_state_dict_post_hook(_loaded) for module in modules]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)
        for product, _ in self._watched.values():
            product.cache = self

    @outside_graphs  # A compiler rounds differently, so codes would differ from the engine's.
    def codes(self, module: nn.Module, name: str, weight: Tensor) -> WeightCodes:
        """Return the codes of a weight, computed again if the cache noticed a change. Local.

        Raises:
            UsageError: the weight is not converted, or the parameter was replaced after the cache
                was made. Also raised if the layer multiplies by parts of the weight.
        """
        if (module, name) not in self._watched:
            raise UsageError(f"{name} of a {type(module).__name__} is not a converted weight.")
        product, parameter = self._watched[module, name]
        present = getattr(module, name)
        if local_part(parameter) is parameter is not present:
            raise UsageError(
                f"{name} of a {type(module).__name__} was replaced after the cache was made. Make "
                "the cache after fully_shard, and again after you replace parameters."
            )
        if local_part(weight).numel() != local_part(present).numel():
            raise UsageError(
                f"{name} of a {type(module).__name__} is multiplied in parts, such as "
                f"{list(weight.shape)}, but the cache keeps codes of whole weights. Multiply by "
                "the whole weight, or do not use a cache with this model."
            )
        sign, key = _sign(parameter, product), (module, name, weight.shape)
        entry = self._kept.get(key)
        if entry is None or entry.sign != sign:
            self.roundings += 1
            # A tensor made under inference_mode could not serve a later training step.
            with torch.inference_mode(False):
                codes = quantize_both_ways(weight.detach(), product.recipe)
            entry = _Entry(sign, local_part(parameter).detach(), codes)
            self._kept[key] = entry
        return entry.codes

    def advance(self) -> None:
        """Drop all codes. Call `advance` after a write that the cache does not notice. Local."""
        self._kept.clear()

    def close(self) -> None:
        """Stop caching, so that every forward pass quantizes the weights again. Local."""
        self.advance()
        for hook in self._hooks:
            hook.remove()
        for product, _ in self._watched.values():
            if product.cache is self:
                product.cache = None

    def _follow(self, module: nn.Module) -> None:
        """Watch the sharded parameters that a load replaced."""
        for (owner, name), (product, _) in self._watched.items():
            parameter = getattr(module, name, None)
            if owner is module and parameter is not None and local_part(parameter) is not parameter:
                self._watched[owner, name] = product, parameter

    def __enter__(self) -> WeightCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a model has no cache, because the cache would not notice its changes.
        return type(None), ()


def _loaded(module: nn.Module, _: object) -> None:
    # Finds the cache through the module, so that a copy of the module does not refer to the cache.
    cache = getattr(getattr(module, "grouped_mm", module), "cache", None)
    if cache is not None:
        cache.advance()
        cache._follow(module)


def _multiplies(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or experts (`grouped_mm`, or two 3-d weights)."""
    if isinstance(module, nn.Linear):
        # nn.MultiheadAttention multiplies by this layer's weight itself. Some wrappers of a linear
        # layer have no weight, and call the wrapped layer.
        is_wrapper = "weight" not in module._parameters and type(module).forward not in _PRODUCTS
        return not is_wrapper and not isinstance(module, NonDynamicallyQuantizableLinear)
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
    """Return the class of a converted layer, which also derives from a host's own class."""
    if issubclass(linear, Fp8Linear):
        return linear
    return (
        Fp8Linear if linear is nn.Linear else type(f"Fp8{linear.__name__}", (Fp8Linear, linear), {})
    )


class _Entry(NamedTuple):
    sign: tuple[Any, ...]
    weight: Tensor  # Kept alive, so that its address is not reused.
    codes: WeightCodes


def _sign(parameter: Tensor, product: Any) -> tuple[Any, ...]:
    # A DTensor counts writes to itself. Its local part counts the writes of optimizers.
    parts = [parameter, local_part(parameter)]
    versions = [0 if part.is_inference() else part._version for part in parts]
    return *versions, parts[1].data_ptr(), parts[1].dtype, product.recipe
