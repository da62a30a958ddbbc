"""A model of transformers, split over meshes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from ....errors import PlanError, UnsupportedError
from ...attention.ulysses import ulysses_attention
from ...experts.all_to_all import AllToAllDispatcher
from ...experts.dispatcher import TokenDispatcher
from ...fsdp import fully_shard_moe
from ...mesh import Meshes
from ...sequence import SequencePlan
from .attention import Context, install_attention
from .experts import experts_of, install_experts, routers_of
from .families import FAMILIES
from .recurrence import install_recurrence

__all__ = ["local_inputs", "parallelize"]


def parallelize(
    model: PreTrainedModel,
    meshes: Meshes,
    *,
    attention: Callable[..., Tensor] | None = None,
    precision: MixedPrecisionPolicy | None = None,
    dispatcher: TokenDispatcher | None = None,
) -> None:
    """Run a causal language model's experts, sequences and FSDP2 over `meshes`, in place.

    Outputs and gradients are those of the model on one rank. Names of parameters stay; the
    parameters become DTensors, so `layout_of` says what each rank holds. Hooks on the router keep
    working: the experts take the ids that the router module returns, whoever put them there.
    Build optimizers afterwards. Local; the model's weights must be equal on all ranks.

    Args:
        model: in full on every rank.
        attention: `ring_attention`, `ulysses_attention`, or one with their signature; then the
            model is called with `local_inputs`. Default: Ulysses if sequences are split, the
            model's own attention otherwise.
        precision: see `fully_shard_moe`; routers stay in float32.
        dispatcher: must share experts over `meshes.expert`; default: `AllToAllDispatcher`.

    Raises:
        UnsupportedError: a model that no test covers, or one that cannot be split so.
        PlanError: the expert degree does not divide the experts.
    """
    plan, kind = meshes.plan, model.config.model_type
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"{type(model).__name__} (model_type {kind!r}) was not compared with one rank; these "
            f"were: {sorted(FAMILIES)}. For others call fully_shard_moe with a forward of your own."
        )
    family = FAMILIES[kind]
    if plan.context > 1 and family.context:
        raise UnsupportedError(f"{kind} cannot split sequences: {family.context}.")
    if plan.expert > 1 and not family.experts:
        raise UnsupportedError(f"{kind} has no experts to share. Use expert=1.")
    _own_configs(model)
    experts = experts_of(model)
    fully_shard_moe(
        model,
        meshes,
        layers=model.get_decoder().layers,
        experts=experts,
        routers=routers_of(model),
        precision=precision,
    )
    if dispatcher is None:
        dispatcher = AllToAllDispatcher(meshes.expert.get_group())
    install_experts(experts, dispatcher)
    if attention is not None or plan.context > 1:
        chosen = ulysses_attention if attention is None else attention
        context = Context(meshes.context.get_group(), chosen)
        install_attention(model, context)
        install_recurrence(model, context)


def local_inputs(
    tokens: Tensor, *, sequence: SequencePlan, group: dist.ProcessGroup
) -> dict[str, Any]:
    """What to call a model with for this rank's part of packed documents. Local.

    Args:
        tokens: `[tokens]`, the whole sequence, equal on every rank of `group`.

    Returns:
        `input_ids` and `position_ids`, `[1, local_tokens]`, the plan, and no cache. Labels:
        `sequence.split(sequence.labels(tokens), group=group)`.

    Raises:
        ShapeError, PlanError: as `SequencePlan.split` says.
        PlanError: a rank would hold no token; every rank raises it.
    """
    if not all(sequence.counts):
        raise PlanError(
            "models of transformers need a token on every rank; the plan deals "
            f"{list(sequence.counts)}. Plan with fewer block_tokens, or order='contiguous'."
        )
    return {
        "input_ids": sequence.split(tokens, group=group)[None],
        "position_ids": sequence.positions(group.rank()).to(tokens.device)[None],
        "sequence": sequence,
        "use_cache": False,
    }


def _own_configs(model: PreTrainedModel) -> None:
    """Another model may hold the same configuration, and implementations are chosen there."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            module.config = copies.setdefault(id(config), copy.copy(config))
