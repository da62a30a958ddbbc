"""Float8 products in experts of transformers, registered as an experts implementation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MissingPackageError, UnsupportedError
from ..modules import Fp8GroupedMm, modules_of
from ..modules import convert as convert_modules
from ..recipe import Recipe
from ..rules import Expression, Rule

try:
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise MissingPackageError("transformers", "transformers") from error

__all__ = ["convert"]

_IMPLEMENTATION = "primeblocks_fp8"


def convert(
    model: nn.Module,
    recipe: Recipe,
    *,
    only: Expression,
    exclude: Expression | None = None,
) -> tuple[str, ...]:
    """Convert some linear layers and experts of a transformers model to float8, in place. Local.

    Arguments and result are the same as for `primeblocks.fp8.convert`. This function also converts
    experts, which then use the experts implementation `primeblocks_fp8`. All experts of a layer
    have one name, such as `model.layers.0.mlp.experts`. You may call the `parallelize` of
    `primeblocks.parallel` before or after this function.

    Raises:
        UsageError, UnsupportedError: as for `primeblocks.fp8.convert`.
        UnsupportedError: transformers itself splits the experts over ranks, or the experts are
            stored transposed and tiles are not square. The model stays unchanged.
    """
    experts: dict[str, Any] = {n: m for n, m in modules_of(model) if hasattr(m, "_apply_gate")}
    rule, without = Rule("only", only), exclude and Rule("exclude", exclude)

    def chosen(names: set[str]) -> set[str]:
        return {n for n in names if rule.names(n) and not (without and without.names(n))}

    transposed = {name for name, module in experts.items() if module.is_transposed}
    square = recipe.weights.rows == recipe.weights.columns
    if not square and (met := chosen(transposed)):
        raise UnsupportedError(
            f"{len(met)} modules of experts, such as {min(met)}, store weights as [experts, in, "
            f"out]. Tiles of {recipe.weights} would run along another dim in training than in the "
            "tensors that are sent. Use square tiles, or exclude the experts."
        )
    mamba = [name for name, module in modules_of(model) if hasattr(module, "A_log")]
    if met := chosen({f"{n}.dt_proj" for n in mamba} & {n for n, _ in modules_of(model)}):
        raise UnsupportedError(
            f"{min(met)} is not called: its layer reads the weight itself. Exclude dt_proj."
        )
    stock = [module for module in experts.values() if not hasattr(module, "grouped_mm")]
    if any(module._is_expert_parallel for module in stock):
        raise UnsupportedError(
            "transformers itself already shares these experts among ranks. Share the experts "
            "with primeblocks.parallel.adapters.transformers.parallelize instead."
        )
    for module in stock:
        module.grouped_mm = None
    try:
        names = convert_modules(model, recipe, only=only, exclude=exclude)
    finally:
        for module in stock:
            if module.grouped_mm is None:
                del module.grouped_mm
    ExpertsInterface.register(_IMPLEMENTATION, _forward)
    for module in stock:
        if isinstance(getattr(module, "grouped_mm", None), Fp8GroupedMm):
            module.config = copy.copy(module.config)  # All layers share one config.
            module.config._experts_implementation = _IMPLEMENTATION
    return names


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, scores: Tensor) -> Tensor:
    top_k = top_k_index.shape[-1]
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    every = torch.arange(module.num_experts, device=experts.device)
    offsets = torch.searchsorted(experts, every, right=True).int()

    def linear(name: str, rows: Tensor) -> Tensor:
        weight, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
        weight = weight.mT if module.is_transposed else weight
        out = module.grouped_mm(name, rows, weight, offsets)
        return out if bias is None else out + bias[experts]

    rows = hidden_states[order // top_k]
    if module.has_gate:
        inner = module._apply_gate(linear("gate_up_proj", rows))
    else:
        inner = module.act_fn(linear("up_proj", rows))
    out = linear("down_proj", inner) * scores.reshape(-1)[order, None]
    slots = torch.empty_like(out).index_copy(0, order, out)
    return slots.unflatten(0, (-1, top_k)).sum(1).to(hidden_states.dtype)
