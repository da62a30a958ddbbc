"""Digests of the weights that vLLM's workers compute with, after kernels have packed them.

On a CPU, vLLM drops the weight of a linear layer once its kernel has packed it. Here the kernel
multiplies the identity matrix by the weight, which returns the weight exactly. Experts are
unpacked: packing the numbers 0, 1, 2, ... shows the order of the elements. A weight that cannot be
seen is reported with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import EngineError
from ...convert.conversion import Reads
from ...observed import HELD, MULTIPLIED, Observed, Seen, observe
from ...receive import Subscriber

__all__ = ["look_into", "observe_worker"]

_ROWS = 256
# Attention computes these from other parameters.
_DERIVED = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")
# Methods and backends that leave parameters as they were loaded, or have packed them for a CPU.
_UNPACKED = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")


def observe_worker(
    model: nn.Module, subscriber: Subscriber | None, reads: Reads | None
) -> Observed:
    """Worker: digest the weights of this reader's part of the plan. `attach` recorded `reads`."""
    if subscriber is None or reads is None or reads.into is None:
        raise EngineError("this worker is not attached. Call attach() first.")
    places, into = _places(model), reads.into
    seen = observe(
        subscriber.plan, look_into(model), reader=subscriber.reader, convert=into, lost=reads.lost
    )
    known = {id(getattr(*places[name])) for name in into.targets if name in places}
    extra = tuple(
        name
        for name, place in places.items()
        if place[1] in place[0]._parameters
        and place[1] not in _DERIVED
        and id(getattr(*place)) not in known
    )
    return replace(seen, unexpected=extra)


def look_into(model: nn.Module) -> Callable[[str], Sequence[Seen] | str]:
    """Return a function that returns a parameter in all forms that the model uses. Local."""
    places = _places(model)

    @lru_cache(4)  # A few are enough, because boxes of one parameter follow each other.
    def look(name: str) -> Sequence[Seen] | str:
        if name not in places:
            return "no parameter of this name is left after loading"
        module, attribute = places[name]
        parameter: Tensor = getattr(module, attribute)
        held = parameter.detach()
        method = type(getattr(module, "quant_method", None)).__name__
        if attribute.startswith(("w13_", "w2_")):
            return _experts(module, attribute, held)
        why = {
            f"laid out as {method} does": method not in _UNPACKED,
            "packed for convolutions": hasattr(module, "_cpu_unpacked_conv_weight"),
            "attention multiplies by matrices made from it": name.endswith("kv_b_proj.weight"),
        }
        if any(why.values()):
            return next(reason for reason, holds in why.items() if holds)
        forms = [Seen(HELD, held)] if held.numel() else []
        users = [m for m in model.modules() if m._parameters.get("weight") is parameter]
        return forms + [Seen(MULTIPLIED, w) for m in users if (w := _multiplied(m)) is not None]

    return look


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and the attribute of each tensor, by names without LoRA's wrappers."""
    return {
        f"{prefix}.{name}".removeprefix(".").replace(".base_layer.", "."): (module, name)
        for prefix, module in model.named_modules()
        for name, one in (module._parameters | module._buffers).items()
        if one is not None
    }


def _multiplied(layer: Any) -> Tensor | None:
    """Return the matrix that a layer's packed kernel multiplies by, or None without such a kernel.

    It is exact, because only zeros are added to each element.
    """
    kernel = getattr(layer, "cpu_linear", None)
    if kernel is None or kernel is nn.functional.linear:
        return None
    sizes = "input_size_per_partition", "input_size", "embedding_dim"
    columns = next(size for name in sizes if (size := getattr(layer, name, None)))
    dtype = layer.weight.dtype
    rows = []
    for start in range(0, columns, _ROWS):
        unit = torch.zeros(min(_ROWS, columns - start), columns, dtype=dtype)
        unit.diagonal(start).fill_(1)
        rows.append(kernel(unit, layer.weight, None))
    return torch.cat(rows).T


def _experts(layer: Any, name: str, held: Tensor) -> Sequence[Seen] | str:
    """Return the matrices of all experts, unpacked and without padding."""
    method = layer.quant_method
    if type(method).__name__ != "UnquantizedFusedMoEMethod":
        return f"laid out as {type(method).__name__} does"
    backend = method.unquantized_backend.name
    if backend in _PLAIN_EXPERTS:
        return [Seen(HELD, held)]
    if backend != "CPU":
        return f"laid out for {backend}"
    kernel, config = method.moe_kernel.fused_experts, layer.moe_config
    size, padded = config.intermediate_size_per_partition, kernel._padded_intermediate_size(config)
    if name.endswith("_weight") and not kernel._use_zentorch:
        order = _packed_order(tuple(held.shape[1:]), held.dtype, kernel.isa)
        if order is None:
            return f"packed for {kernel.isa}, which does more than move elements"
        unpacked = torch.empty_like(held).view(len(held), -1)
        unpacked[:, order] = held.view(len(held), -1)
        held = unpacked.view(held.shape)
    if padded != size and name.startswith("w13_"):
        held = torch.cat([held[:, :size], held[:, padded : padded + size]], 1)
    elif padded != size and name == "w2_weight":
        held = held[:, :, :size]
    return [Seen(HELD, held)]


@lru_cache(8)
def _packed_order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor | None:
    """Return the original index of each packed element, or None if packing changes elements.

    To find the order, it packs the indices themselves, in 16-bit halves.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(shape[0] * shape[1]).view(1, *shape)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    found = torch.zeros_like(numbers).view(-1)
    for shift in (0, 16):
        half = (numbers >> shift & 0xFFFF).to(bits).view(dtype)
        found |= (cpu_prepack_moe_weight(half, isa).view(bits).long().view(-1) & 0xFFFF) << shift
    return found if found.sort().values.equal(numbers.view(-1)) else None
