"""Checkpoints of transformers, written from and read into a sharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ....errors import PlanError, UnsupportedError
from ....groups import agree

__all__ = ["load_pretrained", "materialize", "save_pretrained"]


def save_pretrained(model: PreTrainedModel, path: str | Path) -> None:
    """Write the whole model, as its own `save_pretrained` would from one rank. Collective.

    Rank 0 gathers one parameter after the other in host memory and writes them all; it returns
    last. To resume a run, save its parts instead: docs/parallel.md.

    Args:
        model: what `parallelize` was called with.

    Raises:
        UnsupportedError: it has adapters, under whose names nothing could load it.
    """
    _refuse_adapters(model)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    if dist.get_rank() != 0:
        return
    for name, source in model.all_tied_weights_keys.items():
        state[name] = state[source]  # Gathered one by one, they no longer share memory.
    sharded: Any = type(model)
    # transformers finds the names of a checkpoint by the name of the class, which FSDP changed.
    model.__class__ = _kind(model)
    try:
        model.save_pretrained(path, state_dict=state)
    finally:
        model.__class__ = sharded


def load_pretrained(model: PreTrainedModel, path: str | Path) -> None:
    """Fill the parts with the weights of a checkpoint of transformers. Collective.

    Rank 0 reads the whole model into host memory; each parameter is sent to all ranks, which keep
    their part of it, in the dtype that it has there.

    Args:
        model: what `parallelize` was called with; it may have come from the meta device.

    Raises:
        UnsupportedError: it has adapters, whose names no such checkpoint holds.
        PlanError: rank 0 cannot read it, or it holds other names or shapes.
        RankError: raised on the other ranks where rank 0 raises PlanError.
    """
    _refuse_adapters(model)
    state: dict[str, Any] = {}
    problem, everyone = None, dist.group.WORLD
    assert everyone is not None
    if dist.get_rank() == 0:
        try:
            state = _read(model, path)
        except PlanError as error:
            problem = error
    device = next(model.parameters()).device
    agree("load_pretrained", {}, problem=problem, group=everyone, device=device)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # After a forward without a backward some are whole.
            module.reshard()
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=sent)


def _read(model: PreTrainedModel, path: str | Path) -> dict[str, Tensor]:
    kind = _kind(model)
    try:
        whole, told = kind.from_pretrained(path, dtype=model.dtype, output_loading_info=True)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as a {kind.__name__}: {error}") from error
    state = whole.state_dict()
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    found = {name: tuple(x.shape) for name, x in state.items() if name not in told["missing_keys"]}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise PlanError(
                f"{path} is no checkpoint of this model: {name} is {found.get(name, 'missing')} "
                f"there and {wanted.get(name, 'missing')} here. Build the model from the "
                "configuration of its checkpoint."
            )
    return state


def materialize(model: PreTrainedModel, device: str) -> None:
    """Give a model from the meta device memory for its parts, and nothing else. Local.

    Parameters hold NaN until they are loaded, so that a forgotten one does not pass for a weight.
    Buffers that no checkpoint holds, such as frequencies, are computed as at construction.

    Raises:
        PlanError: some parameters are on the meta device and others are not.
    """
    bare = sum(parameter.is_meta for parameter in model.parameters())
    every = sum(1 for _ in model.parameters())
    if not bare:
        return
    if bare < every:
        raise PlanError(
            f"{bare} of {every} parameters are on the meta device. Build the whole model there."
        )
    model.to_empty(device=device)  # FSDP keeps tied weights tied.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
            # transformers draws no values where it finds this.
            parameter._is_hf_initialized = True
    for owner in model.modules():
        if isinstance(owner, PreTrainedModel):
            for module in owner.modules():
                if any(True for _ in module.buffers(recurse=False)):
                    owner._init_weights(module)


def _kind(model: PreTrainedModel) -> Any:
    """The class that the model had before it was sharded."""
    return next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))


def _refuse_adapters(model: nn.Module) -> None:
    for name, _ in model.named_parameters():
        if "lora_" in name or ".base_layer." in name:
            raise UnsupportedError(
                f"the model has adapters ({name}). Keep theirs by PEFT and "
                "expert_lora_state_dict, and the weights with adapters added by "
                "merged_expert_weights."
            )
