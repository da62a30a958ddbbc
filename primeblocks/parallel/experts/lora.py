"""Low-rank adapters on the weights of experts.

An expert's weight W becomes W + alpha/rank · B A. A forward does not form the sum, but multiplies
rows by A and B in addition to W. The factors are parameters of the same module with experts as dim
0, so they are sharded and clipped like the weight.

Source: arXiv:2106.09685, low-rank adaptation.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...errors import PlanError, UnsupportedError, check_counts
from ...layout import layout_of, local_part
from ..gathered import reshard

__all__ = ["add_expert_lora", "expert_lora_state_dict", "merged_expert_weights"]

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def add_expert_lora(
    model: nn.Module, *, rank: int, alpha: float, dtype: torch.dtype | None = None
) -> list[str]:
    """Add low-rank factors to the experts of `model`, and freeze the experts' own weights.

    The function adapts the parameters `gate_up_proj`, `up_proj` and `down_proj` of shape
    `[experts, ...]`. The new parameter `NAME_lora_A`, `[experts, rank, in]`, is initialised like a
    linear layer's weight. The new parameter `NAME_lora_B`, `[experts, out, rank]`, is zero. Outputs
    therefore do not change until the first optimizer step. `GroupedExperts` applies the factors.
    Experts of transformers apply the factors only if they have a dispatcher. Without a dispatcher,
    their forward raises UnsupportedError.

    Other modules do not change. To adapt other modules, apply PEFT before this function, because
    PEFT freezes all parameters that PEFT did not add. Inside `disable_adapter` of PEFT, the experts
    then compute without their factors. Local. Call this function before `fully_shard_moe`. Torch's
    random state must be equal on all ranks.

    Args:
        rank: the rank of the factors. If `rank` is a multiple of 8, torch's grouped kernel supports
            bfloat16 rows.
        alpha: the product of the factors is scaled by `alpha / rank`.
        dtype: the dtype of the factors. Default: the weight's dtype. For bfloat16 weights, float32
            factors do not lose small optimizer steps. Rows are multiplied in the dtype of the rows,
            for every dtype of the factors.

    Returns:
        The names of the adapted weights.

    Raises:
        PlanError: the model has no experts with adaptable parameters, the rank is below 1, or
            experts have an adapter already.
        UnsupportedError: the experts are sharded already.
    """
    check_counts(rank=rank)
    scaling = alpha / rank
    found = [
        (path, module, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name in _WEIGHTS and parameter.ndim == 3
    ]
    if not found:
        raise PlanError(
            f"no experts of {type(model).__name__} have a parameter [experts, ...] named "
            f"{' or '.join(_WEIGHTS)}."
        )
    for path, module, name in found:
        _check_bare(module, name, path or name)
    # `disable_adapter` of PEFT sets this attribute in all layers of PEFT, so one layer is enough.
    # In a list, the layer does not become a child of the experts.
    switches = [m for m in model.modules() if hasattr(m, "_disable_adapters")][:1]
    for module in dict.fromkeys(module for _, module, _ in found):
        module.requires_grad_(False)
        module.lora_scaling = scaling
        module.lora_switches = switches
        module.register_forward_pre_hook(_refuse_unless_applied)
    for _, module, name in found:
        _add_factors(module, name, rank, dtype)
    return [f"{path}.{name}".lstrip(".") for path, _, name in found]


@torch.no_grad()
def merged_expert_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each adapted weight with its adapter added, for an export.

    Each yielded tensor is new, and has the name, layout and dtype of its weight. Weight and adapter
    are added in float32 or a wider dtype. The sum is rounded once, to the dtype of its weight, so a
    bfloat16 weight loses small changes that the trainer's forward computes with. The model's values
    do not change. The call is collective
    for a sharded model, and otherwise local. A sharded model is resharded, and a rank gathers the
    factors of the experts that its FSDP group shares. The rank multiplies the factors only for its
    own part.
    """
    reshard(model)
    for path, module, name in _adapted(model):
        weight: Tensor = getattr(module, name)
        exact = torch.promote_types(weight.dtype, torch.float32)
        a, b = (_gathered(getattr(module, f"{name}_lora_{factor}")) for factor in "AB")
        first = layout_of(a).shard.offsets[0]
        a, b = local_part(a).to(exact), local_part(b).to(exact) * module.lora_scaling
        if getattr(module, "is_transposed", False):  # [experts, in, out]
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        experts, rows, columns = layout_of(weight).shard.slices
        own = slice(experts.start - first, experts.stop - first)
        merged = (local_part(weight).to(exact) + b[own, rows] @ a[own, :, columns]).to(weight.dtype)
        yield f"{path}{name}", _laid_out_as(weight, merged)


@torch.no_grad()
def expert_lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole factors, with the names and shapes that PEFT uses for `target_parameters`.

    The factor A is `[experts * rank, in]`, and the factor B is `[out, rank * experts]` with experts
    last. If both weights of a module are adapted, the names of the first weight's factors contain
    `base_layer`. The call is collective for a sharded model, and otherwise local.
    """
    reshard(model)
    adapted = list(_adapted(model))
    state = {}
    for index, (path, module, name) in enumerate(adapted):
        depth = sum(other is module for _, other, _ in adapted[index + 1 :])
        prefix = path + "base_layer." * depth
        a, b = (_whole(getattr(module, f"{name}_lora_{factor}")) for factor in "AB")
        state[f"{prefix}lora_A.weight"] = a.flatten(0, 1)
        state[f"{prefix}lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return state


def _add_factors(module: nn.Module, name: str, rank: int, dtype: torch.dtype | None) -> None:
    weight = module.get_parameter(name)
    experts, out, in_ = weight.shape
    if getattr(module, "is_transposed", False):
        out, in_ = in_, out
    a = weight.new_empty(experts * rank, in_, dtype=dtype)
    nn.init.kaiming_uniform_(a, a=sqrt(5))
    b = weight.new_zeros(experts, out, rank, dtype=dtype)
    setattr(module, f"{name}_lora_A", nn.Parameter(a.view(experts, rank, in_)))
    setattr(module, f"{name}_lora_B", nn.Parameter(b))


def _check_bare(module: nn.Module, name: str, path: str) -> None:
    if isinstance(module.get_parameter(name), DTensor):
        raise UnsupportedError(
            f"{path} is sharded already, and FSDP2 does not accept new parameters afterwards. Add "
            "adapters before parallelize or fully_shard_moe."
        )
    if hasattr(module, "lora_scaling"):
        raise PlanError(f"{path} has an adapter already.")


def _refuse_unless_applied(module: nn.Module, args: object) -> None:
    """Refuse a forward that would silently leave out the adapters."""
    if not hasattr(module, "dispatcher"):
        raise UnsupportedError(
            f"{type(module).__name__} has no dispatcher yet, and its own forward does not apply "
            "adapters. Call parallelize first. A mesh of one rank is enough."
        )


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the prefix of each adapted weight's name, the module, and the rest of the name."""
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name in own:
            if f"{name}_lora_A" in own:
                yield f"{path}." if path else "", module, name


def _gathered(x: Tensor) -> Tensor:
    """Gather a parameter over all mesh axes except the last, over which experts are split."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()] * (x.device_mesh.ndim - 1) + [x.placements[-1]])


def _whole(x: Tensor) -> Tensor:
    x = _gathered(x)
    return x.full_tensor() if isinstance(x, DTensor) else x


def _laid_out_as(x: Tensor, local: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return local
    return DTensor.from_local(local, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
