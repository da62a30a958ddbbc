"""Parallelize a model of transformers over meshes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from transformers import PreTrainedModel

from ....errors import PlanError, UnsupportedError
from ...attention.ulysses import ulysses_attention
from ...experts.all_to_all import AllToAllDispatcher
from ...experts.dispatcher import LocalDispatcher, TokenDispatcher
from ...fsdp import check_dispatcher, fully_shard_moe
from ...mesh import Meshes
from ...sequence import SequencePlan
from .attention import Context, install_attention
from .checkpoint import materialize
from .experts import experts_of, install_experts, routers_of
from .indexed import IndexedAttention, install_indexed_attention, scorers_of
from .recurrence import install_recurrence, recurrent_layers

__all__ = ["FAMILIES", "Family", "local_inputs", "parallelize"]

_LIGHTNING = "its lightning attention has a decay of its own that is not built"


@dataclass(frozen=True)
class Family:
    """A family of models, and the splits of it that were compared with one rank.

    Attributes:
        experts: the family has experts that can be shared.
        context: "" if its sequences can be packed and split. Otherwise the reason.
        indexed: an indexer selects the tokens that each query attends to.
    """

    experts: bool = True
    context: str = ""
    indexed: bool = False


_BOTH = Family()
_INDEXED = Family(indexed=True)

# Keys are the `model_type` of the configuration.
FAMILIES: dict[str, Family] = {
    "afmoe": _BOTH,
    "axk2": _INDEXED,
    "deepseek_v3": _BOTH,
    "deepseek_v32": _INDEXED,
    "dots1": _BOTH,
    "exaone_moe": _BOTH,
    "flex_olmo": _BOTH,
    "glm4_moe": _BOTH,
    "glm4_moe_lite": _BOTH,
    "glm_moe_dsa": _INDEXED,
    "gpt_oss": _BOTH,
    "hy_v4": _INDEXED,
    "laguna": _BOTH,
    "llama": Family(experts=False),
    "minimax": Family(context=_LIGHTNING),
    "minimax_m2": _BOTH,
    "mixtral": _BOTH,
    "nemotron_h": _BOTH,
    "olmoe": _BOTH,
    "qwen2_moe": _BOTH,
    "qwen3": Family(experts=False),
    "qwen3_5_moe_text": _BOTH,
    "qwen3_moe": _BOTH,
    "qwen3_next": _BOTH,
    "qwen3_vl_moe": _BOTH,
    "solar_open": _BOTH,
}


def parallelize(
    model: PreTrainedModel,
    meshes: Meshes,
    *,
    attention: Callable[..., Tensor] | IndexedAttention | None = None,
    precision: MixedPrecisionPolicy | None = None,
    dispatcher: TokenDispatcher | None = None,
    recurrence_kernel: Callable[..., tuple[Tensor, Tensor]] | None = None,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Parallelize a causal language model over `meshes`, in place: experts, sequences and FSDP2.

    Outputs and gradients equal those of the model on one rank. Parameter names do not change.
    Parameters become DTensors, and `layout_of` returns the box that each rank holds. Hooks on the
    router keep working: the experts take the ids that the router module returns, also if a hook
    replaced them. Build optimizers afterwards. Local. The model's weights must be equal on all
    ranks.

    Args:
        model: a whole model on every rank, or a model on the meta device. In the second case each
            rank allocates memory for its parts only, and parameters are NaN until they are loaded.
        attention: `ring_attention`, `ulysses_attention`, or a function with their signature, for
            calls with `local_inputs`. Default: `ulysses_attention`. Split sequences need a plan.
            With context=1, a call without a plan keeps the model's own attention and masks.
            Families with an indexer (GLM-5, DeepSeek-V3.2, A.X-K2, HY-V4) take no such function.
            For them pass `IndexedAttention(kernel=..., scores=...)` or nothing.
        precision: see `fully_shard_moe`. Routers and the weights of indexers stay in float32.
        dispatcher: must share experts over `meshes.expert`. Default: `AllToAllDispatcher`, or
            `LocalDispatcher` if one rank has all experts.
        recurrence_kernel: the `kernel` of `gated_delta_rule` (Qwen3-Next, Qwen3.5) or of
            `state_space` (Nemotron-H), for the recurrent layers of calls with a plan. Example:
            `partial(chunk_gated_delta_rule, output_final_state=True)` of flash-linear-attention.
            Default: plain torch.
        reshard_after_forward, offload_policy: see `fully_shard_moe`.

    Raises:
        UnsupportedError: no test covers the model, or it cannot be split this way. The model itself
            later raises it for a plan that it cannot follow, or a loss of one rank's tokens only.
        PlanError: the expert degree does not divide the experts, or the dispatcher uses other ranks
            than `meshes.expert`.
    """
    plan, kind = meshes.plan, model.config.model_type
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"{type(model).__name__} (model_type {kind!r}) was not compared with one rank; these "
            f"were: {sorted(FAMILIES)}. For others call fully_shard_moe with a forward of your own."
        )
    family = FAMILIES[kind]
    if family.context and (plan.context > 1 or attention is not None):
        raise UnsupportedError(
            f"{kind} cannot split sequences: {family.context}. Use context=1, no attention=, and "
            "one document a row."
        )
    _check_attention(kind, family, attention)
    if plan.expert > 1 and not family.experts:
        raise UnsupportedError(f"{kind} has no experts to share. Use expert=1.")
    if recurrence_kernel is not None and (family.context or not recurrent_layers(model)):
        raise UnsupportedError(
            f"{kind} has no recurrent layers for recurrence_kernel= to serve. Leave it out."
        )
    check_dispatcher(dispatcher, meshes)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError(
            "parallelize was called on a model that is sharded already. Call it once, on a new "
            "model, and load its weights with load_pretrained."
        )
    _own_configs(model)
    experts, recurrent = experts_of(model), bool(recurrent_layers(model))
    fully_shard_moe(
        model,
        meshes,
        layers=model.get_decoder().layers,
        experts=experts,
        routers=routers_of(model) + scorers_of(model),
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
    )
    offloaded = isinstance(offload_policy, CPUOffloadPolicy)
    materialize(model, meshes.loss.device_type, parts="cpu" if offloaded else None)
    if dispatcher is None and plan.expert == 1:
        dispatcher = LocalDispatcher()
    elif dispatcher is None:
        dispatcher = AllToAllDispatcher(meshes.expert.get_group())
    install_experts(model, dispatcher)
    if not family.context:
        _install(model, attention, family, meshes.context.get_group(), recurrence_kernel)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            admit = partial(_admit_sequence, kind, family, recurrent)
            module.register_forward_pre_hook(admit, with_kwargs=True)
    if plan.world_size > 1:
        model.register_forward_pre_hook(_admit_loss, with_kwargs=True)
    model.save_pretrained = _refuse_to_save


def local_inputs(
    tokens: Tensor, *, sequence: SequencePlan, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Return a model's arguments for this rank's part of packed documents. Local.

    For the model's own loss, pass `sequence.split(sequence.labels(tokens), group=group)[None]` as
    `labels` and as `shift_labels`, with `num_items_in_batch=global_token_count(...)`.

    Args:
        tokens: `[tokens]`, the whole sequence, equal on every rank of `group`.

    Returns:
        `input_ids` and `position_ids`, each `[1, local_tokens]`, the plan, and `use_cache=False`.

    Raises:
        ShapeError, PlanError: as for `SequencePlan.split`.
        PlanError: some rank would hold 0 tokens. Every rank raises this error.
    """
    if not all(sequence.counts):
        raise PlanError(
            "models of transformers need a token on every rank; the plan deals "
            f"{list(sequence.counts)}. Plan with a smaller chunk_tokens, or order='contiguous'."
        )
    return {
        "input_ids": sequence.split(tokens, group=group)[None],
        "position_ids": sequence.positions(group.rank()).to(tokens.device)[None],
        "sequence": sequence,
        "use_cache": False,
    }


def _check_attention(
    kind: str, family: Family, attention: Callable[..., Tensor] | IndexedAttention | None
) -> None:
    """Refuse an attention that cannot compute the attention of the family. Local."""
    if attention is not None and not isinstance(attention, IndexedAttention | Callable):
        raise PlanError(
            f"attention= takes a function, such as primeblocks.parallel.attention.ring_attention; "
            f"got {attention!r:.80}."
        )
    if attention is None or isinstance(attention, IndexedAttention) == family.indexed:
        return
    if family.indexed:
        raise UnsupportedError(
            f"in {kind} an indexer chooses tokens from the whole sequence, which "
            f"{getattr(attention, '__name__', 'attention=')} does not gather. Pass "
            "attention=IndexedAttention(kernel=..., scores=...), or nothing."
        )
    raise UnsupportedError(
        f"{kind} has no indexer for IndexedAttention to serve. Pass attention=ring_attention, "
        "ulysses_attention, or nothing."
    )


def _install(
    model: PreTrainedModel,
    attention: Callable[..., Tensor] | IndexedAttention | None,
    family: Family,
    group: dist.ProcessGroup,
    recurrence_kernel: Callable[..., tuple[Tensor, Tensor]] | None,
) -> None:
    if family.indexed:
        assert attention is None or isinstance(attention, IndexedAttention)
        install_indexed_attention(model, attention or IndexedAttention(), group)
        return
    assert not isinstance(attention, IndexedAttention)
    context = Context(group, ulysses_attention if attention is None else attention)
    install_attention(model, context)
    install_recurrence(model, context, recurrence_kernel)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise PlanError(
        "model.save_pretrained was called on a sharded model, of which this rank has parts. Call "
        "primeblocks.parallel.adapters.transformers.save_pretrained(model, folder) on every rank."
    )


def _own_configs(model: PreTrainedModel) -> None:
    """Copy configurations, which choose implementations, because other models may share them."""
    memo: dict[int, Any] = {}  # A part that two modules share, or two configurations, stays one.
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            module.config = copy.deepcopy(config, memo)
            # Parameters are numbers from here on, also if the checkpoint held codes.
            vars(module.config).pop("quantization_config", None)


def _admit_sequence(
    kind: str,
    family: Family,
    recurrent: bool,
    module: PreTrainedModel,
    args: Any,
    arguments: dict[str, Any],
) -> None:
    arguments = _by_name(module, args) | arguments
    sequence = arguments.get("sequence")
    if sequence is None:
        return
    if family.context:
        raise UnsupportedError(
            f"{kind} cannot take packed documents: {family.context}. Call it with one document a "
            "row, without a plan."
        )
    if getattr(sequence, "parents", None) is not None and (recurrent or family.indexed):
        what = "recurrent layers carry one state" if recurrent else "an indexer ranks one range"
        raise UnsupportedError(
            f"{kind} cannot take a plan with parents: its {what} a document, and does not follow "
            "forks. Pack whole rollouts for this family, without trees."
        )
    if arguments.get("position_ids") is None:
        raise PlanError(
            "a plan came without position_ids, and the model would count from this rank's first "
            "token. Call model(**local_inputs(tokens, sequence=plan, group=...))."
        )
    if arguments.get("attention_mask") is not None:
        raise PlanError(
            "attention over split sequences takes documents and no masks. Leave padding out of "
            "the plan, and do not pass attention_mask."
        )
    if arguments.get("labels") is not None and arguments.get("shift_labels") is None:
        raise PlanError(
            "labels= shifts inside this rank's part, across its documents. Shift before the split: "
            "shift_labels=sequence.split(sequence.labels(tokens), group=...)[None]."
        )


def _admit_loss(module: PreTrainedModel, args: Any, arguments: dict[str, Any]) -> None:
    """Refuse a loss of this rank's tokens only, which would look like the loss of all tokens."""
    arguments = _by_name(module, args) | arguments
    asked = arguments.get("output_router_logits")
    config = module.config.get_text_config()
    if getattr(config, "output_router_logits", False) if asked is None else asked:
        raise UnsupportedError(
            "output_router_logits makes an auxiliary loss of this rank's tokens only, and the sum "
            "over ranks is not the loss of all tokens. Switch it off, also in the configuration. "
            "Read the routers with forward hooks."
        )
    if arguments.get("labels") is not None and arguments.get("num_items_in_batch") is None:
        raise PlanError(
            "labels= divides by this rank's tokens, but gradients are sums over all ranks. Pass "
            "num_items_in_batch=global_token_count(...) too."
        )


def _by_name(module: PreTrainedModel, args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
