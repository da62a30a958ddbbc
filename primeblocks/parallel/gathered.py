"""Parameters that FSDP2 left gathered.

A forward without a backward leaves at least the parameters of the root gathered. The model then
lists gathered copies as its parameters. Gradients and optimizer steps belong to the shards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import PlanError, UnsupportedError
from ..layout import local_part
from .mesh import Meshes

__all__ = ["reshard", "shards_of"]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the model lists its shards. Local.

    After an error inside a forward or a backward, FSDP2 would use the weights from before the
    error. The function then also resets FSDP2's state, which drops gradients that are not reduced.

    Raises:
        UnsupportedError: an error left FSDP2 inside a forward or a backward, and torch is older
            than 2.13.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        states = state._state_ctx.all_states if state._is_root else ()
        if all(each._training_state.name == "IDLE" for each in states):
            module.reshard()
        elif hasattr(module, "reset_iter_state"):
            module.reset_iter_state()
        else:
            raise UnsupportedError(
                "an error left FSDP2 inside a forward or a backward, and torch "
                f"{torch.__version__} cannot reset FSDP2's state. Build the model again, or "
                "install torch 2.13."
            )


def shards_of(parameters: list[Tensor], meshes: Meshes) -> list[Tensor]:
    """Return `parameters` with shards in place of gathered copies. Reshards their models. Local.

    Raises:
        PlanError: a gathered copy has a gradient, so FSDP2 has not reduced the gradient. Also
            raised if FSDP2 has freed a copy that `parameters` still contains.
    """
    # `fully_shard_moe` shards every parameter over at least one of these axes.
    axes = {*(meshes.fsdp.mesh_dim_names or ()), *(meshes.expert_fsdp.mesh_dim_names or ())}
    gathered = {id(p): p for p in parameters if not axes & _axes_of(p)}
    if not gathered:
        return parameters
    shards: dict[int, Tensor] = {}
    for model in meshes.models:
        copies = {name: p for name, p in model.named_parameters() if id(p) in gathered}
        left = [name for name, copy in copies.items() if copy.grad is not None]
        if left:
            raise PlanError(
                f"FSDP2 left {len(left)} parameters unsharded, such as {left[0]!r}, and did not "
                "reduce their gradients. Reentrant checkpointing with several forwards before one "
                "backward does so. Call backward after each forward, or checkpoint with "
                "use_reentrant=False."
            )
        if copies:
            reshard(model)
            shards |= {id(copy): model.get_parameter(name) for name, copy in copies.items()}
    others = [local_part(p) for at, p in gathered.items() if at not in shards and p.requires_grad]
    freed = sum(x.numel() > 0 and not x.untyped_storage().nbytes() for x in others)
    if freed:
        raise PlanError(
            f"{freed} of {len(parameters)} parameters are gathered copies that FSDP2 has freed. "
            "They were listed after a forward without a backward, and get no gradients. List "
            "model.parameters() before the first forward, also for the optimizer."
        )
    return [shards.get(id(parameter), parameter) for parameter in parameters]


def _axes_of(parameter: Tensor) -> set[str]:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return set(names or ())
