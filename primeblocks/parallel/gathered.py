"""Parameters that FSDP2 left gathered.

After a forward, FSDP2 keeps at least the parameters of the root gathered until the backward. The
model then lists gathered copies as its parameters. Gradients, optimizer steps and `requires_grad`
belong to the shards. No backward follows a forward without gradients, so a hook reshards the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import PlanError
from ..groups import outside_graphs
from ..layout import local_part
from .mesh import Meshes

__all__ = ["after_forward", "check_reduced", "reshard", "shards_of"]


@outside_graphs
def after_forward(model: nn.Module, args: object, output: object) -> None:
    """Let the model list its shards after a forward without gradients. A hook. Local.

    PEFT's `disable_adapter` freezes the listed parameters and later unfreezes them. If it froze
    shards and unfroze gathered copies, FSDP2 would not train the parameters any more.
    """
    if not torch.is_grad_enabled():
        for module in _units(model):
            module.reshard()
        return
    for group in [each for unit in _units(model) for each in _groups(unit._get_fsdp_state())]:
        trained = any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)
        if trained and group._orig_dtype is None:  # All were frozen at FSDP2's first forward.
            group._init_mp_dtypes()


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the model lists its shards. Local.

    After an error inside a forward or a backward, FSDP2 would use the weights from before the
    error. With torch 2.13 or later, the function then also resets FSDP2's state. It drops the
    gradients that are not reduced.
    """
    for module in _units(model):
        state = module._get_fsdp_state()
        states = state._state_ctx.all_states if state._is_root else ()
        if all(each._training_state.name == "IDLE" for each in states):
            module.reshard()
            continue
        groups = [group for each in states for group in _groups(each)]
        for parameter in [parameter for group in groups for parameter in group.fsdp_params]:
            parameter.unsharded_accumulated_grad = None  # FSDP2 would keep the gradients.
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        if hasattr(module, "reset_iter_state"):  # Waits for running collectives first.
            module.reset_iter_state()
        else:
            for group in groups:
                group._to_sharded()


def check_reduced(model: nn.Module) -> None:
    """Reshard a model, and refuse gradients that FSDP2 has not reduced. Drops them. Local.

    Raises:
        PlanError: a gathered parameter has a gradient, or an error ended a backward.
    """
    before = {name: p for name, p in model.named_parameters() if p.grad is not None}
    states = [module._get_fsdp_state() for module in _units(model)]
    failed = any(each._training_state.name == "PRE_BACKWARD" for each in states)
    reshard(model)
    if failed:
        raise PlanError(
            "an error ended a backward, so some gradients are missing. Clear all gradients, and "
            "repeat the step. With torch before 2.13, build the model again."
        )
    left = [name for name, p in before.items() if model.get_parameter(name) is not p]
    for name in left:  # The next backward would add to them.
        before[name].grad = None
    if left:
        raise PlanError(
            f"FSDP2 left {len(left)} parameters unsharded, such as {left[0]!r}, and did not reduce "
            "their gradients. Reentrant checkpointing with several forwards before one backward "
            "does so. Clear the gradients. Then call backward after each forward, or checkpoint "
            "with use_reentrant=False."
        )


def shards_of(parameters: list[Tensor], meshes: Meshes) -> list[Tensor]:
    """Return `parameters` with shards in place of gathered copies. Reshards their models. Local.

    Raises:
        PlanError: a gathered copy has a gradient, so FSDP2 has not reduced the gradient. Also
            raised if FSDP2 has freed a copy that `parameters` still contains.
    """
    given, shards = {id(parameter) for parameter in parameters}, dict[int, Tensor]()
    for model in meshes.models:
        listed = dict(model.named_parameters())
        groups = [group for module in _units(model) for group in _groups(module._get_fsdp_state())]
        owned = {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}
        if given.isdisjoint(owned | {*map(id, listed.values())}):
            continue
        check_reduced(model)
        shards |= {id(copy): model.get_parameter(name) for name, copy in listed.items()}
    # `fully_shard_moe` shards every parameter over at least one of these axes.
    axes = {*(meshes.fsdp.mesh_dim_names or ()), *(meshes.expert_fsdp.mesh_dim_names or ())}
    gathered = {id(p): p for p in parameters if not axes & _axes_of(p)}
    others = [local_part(p) for at, p in gathered.items() if at not in shards and p.requires_grad]
    freed = sum(x.numel() > 0 and not x.untyped_storage().nbytes() for x in others)
    if freed:
        raise PlanError(
            f"{freed} of {len(parameters)} parameters are gathered copies that FSDP2 has freed. "
            "They were listed after a forward without a backward, and get no gradients. List "
            "model.parameters() before the first forward, also for the optimizer."
        )
    return [shards.get(id(parameter), parameter) for parameter in parameters]


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _axes_of(parameter: Tensor) -> set[str]:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return set(names or ())
