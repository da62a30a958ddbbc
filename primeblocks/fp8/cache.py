"""Weights that are quantized once a version."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import UsageError
from ..layout import local_part
from .matmul import WeightCodes, quantize_both_ways
from .modules import converted

__all__ = ["WeightCache"]


class WeightCache:
    """Codes of a converted model's weights, kept until a weight changes.

    All micro-batches of a step, forward, backward and recomputation, use one rounding. Weights are
    taken to have changed when any torch optimizer of the process has stepped, when they were loaded
    or written in place (their version numbers), or lie elsewhere. Under FSDP2 the sharded parameter
    is watched: the gathered one is refilled without a sign. What no sign shows needs `advance()`:
    a write to `weight.data`, as PEFT merges adapters, or by `torch._foreach_*` to a DTensor.

    Codes are kept whole, a byte a value, or two if the engine copies transposed ones: under FSDP2
    that is memory which the sharding had saved.

    Args:
        model: converted, and sharded already if it is to be.
        optimizers: all that update its converted weights. Without any, weights must be frozen.

    Raises:
        UsageError: nothing was converted; a weight that wants gradients is in none of the
            optimizers, so that nothing might tell that it changed.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        if not isinstance(model, nn.Module) or not all(
            hasattr(optimizer, "param_groups") for optimizer in optimizers
        ):
            raise UsageError(
                "needs a model and its optimizers; got "
                f"{[type(one).__name__ for one in (model, *optimizers)]}"
            )
        self._kept: dict[tuple[nn.Module, str], _Entry] = {}
        self._watched: dict[tuple[nn.Module, str], tuple[Any, Tensor]] = {}
        self.roundings = 0
        updated = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for module, product, name, parameter in converted(model):
            if parameter.requires_grad and id(parameter) not in updated:
                raise UsageError(
                    f"{name} of a {type(module).__name__} wants gradients and is in none of the "
                    f"{len(optimizers)} optimizers: nothing would tell that it changed. Make the "
                    "cache after fully_shard and the optimizers, WeightCache(model, optimizer), "
                    "with FSDP2's weights at rest (model.reshard()); or do without."
                )
            self._watched[module, name] = product, parameter
        if not self._watched:
            raise UsageError("no layer of the model is converted; call convert first")
        this = weakref.ref(self)

        def changed(*_: object) -> None:
            if (cache := this()) is not None:
                cache.advance()

        def loaded(module: nn.Module, _: object) -> None:
            if (cache := this()) is not None:
                cache.advance()
                cache._follow(module)

        modules = {module for module, _ in self._watched}
        self._hooks = [register_optimizer_step_post_hook(changed)]
        self._hooks += [module.register_load_state_dict_post_hook(loaded) for module in modules]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)
        for product, _ in self._watched.values():
            product.cache = self

    def codes(self, module: nn.Module, name: str, weight: Tensor) -> WeightCodes:
        """Return the codes of a weight that a layer is about to use. Local.

        Raises:
            UsageError: it is not the parameter that the cache was made for, or a part of it.
        """
        if (module, name) not in self._watched:
            raise UsageError(f"{name} of a {type(module).__name__} is no weight that is converted")
        product, parameter = self._watched[module, name]
        if local_part(parameter) is parameter is not getattr(module, name):
            raise UsageError(
                f"{name} of a {type(module).__name__} is another parameter than when the cache was "
                "made: make it after fully_shard, and anew when parameters are replaced"
            )
        sign = _sign(parameter, product)
        entry = self._kept.get((module, name))
        if entry is None or entry.sign != sign:
            self.roundings += 1
            # What is made under inference_mode could not serve the training that follows.
            with torch.inference_mode(False):
                codes = quantize_both_ways(weight.detach(), product.recipe)
            entry = _Entry(sign, local_part(parameter).detach(), codes)
            self._kept[module, name] = entry
        if entry.codes.forward.shape != weight.shape:
            raise UsageError(
                f"{name} of a {type(module).__name__} is multiplied by in parts of different "
                "shapes; do without a cache"
            )
        return entry.codes

    def advance(self) -> None:
        """Forget all codes: the weights changed. Optimizers' steps call it. Local."""
        self._kept.clear()

    def close(self) -> None:
        """Round in every forward again. Local."""
        self.advance()
        for hook in self._hooks:
            hook.remove()
        for product, _ in self._watched.values():
            if product.cache is self:
                product.cache = None

    def _follow(self, module: nn.Module) -> None:
        """Watch the sharded parameters that a load put in the place of others."""
        for (owner, name), (product, _) in self._watched.items():
            parameter = getattr(module, name, None)
            if owner is module and parameter is not None and local_part(parameter) is not parameter:
                self._watched[owner, name] = product, parameter

    def __enter__(self) -> WeightCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a model has no cache: nothing would tell it of changes.
        return type(None), ()


class _Entry(NamedTuple):
    sign: tuple[Any, ...]
    weight: Tensor  # Kept, so that no other one can come to lie in its place.
    codes: WeightCodes


def _sign(parameter: Tensor, product: Any) -> tuple[Any, ...]:
    # Writes to a DTensor count on it, those of optimizers on its local part.
    parts = [parameter, local_part(parameter)]
    versions = [0 if part.is_inference() else part._version for part in parts]
    return *versions, parts[1].data_ptr(), parts[1].dtype, product.recipe
