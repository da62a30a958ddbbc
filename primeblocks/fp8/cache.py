"""Weights that are quantized once a version."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError
from ..layout import local_part
from .matmul import WeightCodes, quantize_both_ways
from .modules import converted
from .recipe import Recipe

__all__ = ["WeightCache"]


class WeightCache:
    """Codes of a converted model's weights, kept until a weight changes.

    All micro-batches of a step, forward, backward and recomputation, use one rounding. A weight
    is taken to have changed when an optimizer has stepped, when it was written in place (its
    version number), or lies elsewhere. Under FSDP2 the sharded parameter is watched: the gathered
    one is refilled without a sign. What no sign shows, such as a write to `weight.data`, needs
    `advance()`.

    Codes are kept whole, a byte a value, or two if the engine copies transposed ones: under FSDP2
    that is memory which the sharding had saved.

    Args:
        model: converted, and sharded already if it is to be.
        optimizers: all that update its converted weights. Without any, weights must be frozen.

    Raises:
        UsageError: nothing was converted; a weight that wants gradients is in none of the
            optimizers, so that nothing would tell that it changed; an optimizer tells of no steps.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        self._kept: dict[tuple[nn.Module, str], _Entry] = {}
        self._watched: dict[tuple[nn.Module, str], tuple[Recipe, Tensor]] = {}
        self._products: list[Any] = []
        self.roundings = 0
        updated = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for module, product, name, parameter in converted(model):
            if parameter.requires_grad and id(parameter) not in updated:
                raise UsageError(
                    f"{name} of a {type(module).__name__} wants gradients and is in none of the "
                    f"{len(optimizers)} optimizers: nothing would tell that it changed. Make the "
                    "cache after fully_shard and the optimizers, WeightCache(model, optimizer), "
                    "or do without."
                )
            self._watched[module, name] = product.recipe, parameter
            self._products.append(product)
        if not self._watched:
            raise UsageError("no layer of the model is converted; call convert first")
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_post_hook"):
                raise UsageError(
                    f"a {type(optimizer).__name__} tells nobody of its steps: it has no "
                    "register_step_post_hook. Do without a cache."
                )
        self._hooks = [o.register_step_post_hook(lambda *_: self.advance()) for o in optimizers]
        for product in self._products:
            product.cache = self

    def codes(self, module: nn.Module, name: str, weight: Tensor) -> WeightCodes:
        """Return the codes of a weight that a layer is about to use. Local.

        Raises:
            UsageError: it is not the parameter that the cache was made for.
        """
        recipe, parameter = self._watched[module, name]
        if local_part(parameter) is parameter is not getattr(module, name):
            raise UsageError(
                f"{name} of a {type(module).__name__} is another parameter than when the cache was "
                "made: make it after fully_shard, and anew when parameters are replaced"
            )
        sign = _sign(parameter)
        entry = self._kept.get((module, name))
        if entry is None or entry.sign != sign:
            self.roundings += 1
            # What is made under inference_mode could not serve the training that follows.
            with torch.inference_mode(False):
                entry = _Entry(sign, quantize_both_ways(weight.detach(), recipe))
            self._kept[module, name] = entry
        return entry.codes

    def advance(self) -> None:
        """Forget all codes: the weights changed. Optimizers that were passed call it. Local."""
        self._kept.clear()

    def close(self) -> None:
        """Round in every forward again, and let go of the optimizers. Local."""
        self.advance()
        for hook in self._hooks:
            hook.remove()
        for product in self._products:
            product.cache = None

    def __enter__(self) -> WeightCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a model has no cache: nothing would tell it of changes.
        return type(None), ()


class _Entry(NamedTuple):
    sign: tuple[Any, ...]
    codes: WeightCodes


def _sign(parameter: Tensor) -> tuple[Any, ...]:
    local = local_part(parameter)
    return local._version, local.data_ptr(), local.dtype
