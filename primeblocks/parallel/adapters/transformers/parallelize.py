"""Parallelize a model of transformers over meshes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from transformers import PreTrainedModel

from ....errors import PlanError, UnsupportedError
from ...attention.ulysses import ulysses_attention
from ...experts.all_to_all import AllToAllDispatcher
from ...experts.dispatcher import LocalDispatcher, TokenDispatcher
from ...fsdp import check_dispatcher, fully_shard_moe
from ...mesh import Meshes
from ...sequence import SequencePlan
from .attention import Context, install_attention, install_recurrence, recurrent_layers
from .checkpoint import materialize
from .experts import experts_of, install_experts, routers_of
from .indexed import IndexedAttention, indexed_attentions, install_indexed_attention, scorers_of

__all__ = ["FAMILIES", "local_inputs", "parallelize"]

FAMILIES = (
    "afmoe",
    "axk2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "hy_v4",
    "laguna",
    "llama",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
    "solar_open",
)
"""The `model_type` of each family for which tests compare a split model with one rank."""


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
    """Split experts, sequences and weights (FSDP2) of a causal language model, in place.

    Outputs and gradients are equal to the outputs and gradients of the model on one rank. Parameter
    names do not change. Parameters become DTensors, and `layout_of` returns the box that a rank
    stores. Hooks on the router keep working, even hooks that replace ids, because the experts use
    the ids that the router module returns. Build optimizers after this call. Local. The model's
    weights must be equal on all ranks.

    Args:
        model: a whole model on every rank, or a model on the meta device. For a model on the meta
            device, each rank allocates memory for its parts only, and parameters are NaN until
            weights are loaded.
        attention: `ring_attention`, `ulysses_attention`, or a function with their signature, for
            calls with `local_inputs`. The default attention is `ulysses_attention`. If `context`
            is above 1, calls need the `SequencePlan` from `local_inputs`. With context=1, a call
            without a `SequencePlan` uses the model's own attention and masks. For families with an
            indexer (GLM-5, DeepSeek-V3.2, A.X-K2, HY-V4), pass
            `IndexedAttention(kernel=..., scores=...)`, or omit `attention`.
        precision: see `fully_shard_moe`. Routers, and the layer `weights_proj` of each indexer,
            stay in float32.
        dispatcher: the dispatcher of the experts, which must use the ranks of `meshes.expert`. The
            default dispatcher is `AllToAllDispatcher`, or `LocalDispatcher` if one rank has all
            experts.
        recurrence_kernel: the `kernel` of `gated_delta_rule` (Qwen3-Next, Qwen3.5) or of
            `state_space` (Nemotron-H), for recurrent layers in calls with a `SequencePlan`. An
            example is `partial(chunk_gated_delta_rule, output_final_state=True)` of
            flash-linear-attention. Default: plain torch.
        reshard_after_forward, offload_policy: see `fully_shard_moe`.

    Raises:
        UnsupportedError: no test covers the model, or the model cannot be split with the passed
            arguments. A call of the model raises UnsupportedError or PlanError if the model cannot
            follow the plan, or computes the loss of only one rank's tokens.
        PlanError: the expert degree does not divide the number of experts, or the dispatcher uses
            other ranks than `meshes.expert`.
    """
    plan, kind = meshes.plan, model.config.model_type
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"{type(model).__name__} (model_type {kind!r}) is not one of the tested families: "
            f"{sorted(FAMILIES)}. For another family, call fully_shard_moe with a forward of your "
            "own."
        )
    indexed, recurrent = bool(indexed_attentions(model)), bool(recurrent_layers(model))
    _check_attention(kind, indexed, attention)
    _check_rope(model, plan.context)
    if recurrence_kernel is not None and not recurrent:
        raise UnsupportedError(
            f"{kind} has no recurrent layers that could use recurrence_kernel=. Leave out "
            "recurrence_kernel=."
        )
    check_dispatcher(dispatcher, meshes)
    _own_configs(model)
    fully_shard_moe(
        model,
        meshes,
        layers=model.get_decoder().layers,
        experts=experts_of(model),
        routers=routers_of(model) + scorers_of(model),
        precision=precision,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
    )
    offloaded = isinstance(offload_policy, CPUOffloadPolicy)
    materialize(model, meshes.device, parts="cpu" if offloaded else None)
    _widen_buffers(model)
    if dispatcher is None and plan.expert == 1:
        dispatcher = LocalDispatcher()
    elif dispatcher is None:
        dispatcher = AllToAllDispatcher(meshes.expert.get_group())
    install_experts(model, dispatcher)
    group = meshes.context.get_group()
    if isinstance(attention, IndexedAttention) or (indexed and attention is None):
        install_indexed_attention(model, attention or IndexedAttention(), group)
    else:
        context = Context(group, ulysses_attention if attention is None else attention)
        install_attention(model, context)
        install_recurrence(model, context, recurrence_kernel)
    forks = "recurrent layers carry one state" if recurrent else None
    admit = partial(_admit_sequence, kind, "indexer ranks one range" if indexed else forks)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
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
        ShapeError, PlanError: the errors of `SequencePlan.split`.
        PlanError: a rank would get 0 tokens. Every rank raises this error.
    """
    if not all(sequence.counts):
        raise PlanError(
            "models of transformers need a token on every rank, but the plan assigns "
            f"{list(sequence.counts)}. Plan with a smaller chunk_tokens, or order='contiguous'."
        )
    return {
        "input_ids": sequence.split(tokens, group=group)[None],
        "position_ids": sequence.positions(group.rank()).to(tokens.device)[None],
        "sequence": sequence,
        "use_cache": False,
    }


def _check_attention(kind: str, indexed: bool, attention: object) -> None:
    """Refuse an attention that cannot compute the attention of the family."""
    if attention is not None and not isinstance(attention, IndexedAttention | Callable):
        raise PlanError(
            "attention= must be a function, such as "
            f"primeblocks.parallel.attention.ring_attention; got {attention!r:.80}."
        )
    if attention is None or isinstance(attention, IndexedAttention) == indexed:
        return
    if indexed:
        raise UnsupportedError(
            f"in {kind} an indexer chooses tokens from the whole sequence, which "
            f"{getattr(attention, '__name__', 'attention=')} does not gather. Pass "
            "attention=IndexedAttention(kernel=..., scores=...), or leave attention= out."
        )
    raise UnsupportedError(
        f"{kind} has no indexer that could use IndexedAttention. Pass attention=ring_attention or "
        "ulysses_attention, or leave attention= out."
    )


def _check_rope(model: PreTrainedModel, context: int) -> None:
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if context > 1 and (found := kinds & {"dynamic", "longrope"}):
        raise UnsupportedError(
            f"rope_type {found.pop()!r} takes its frequencies from the largest position of a "
            "rank's tokens, so ranks would rotate differently. Use context=1, or another rope_type."
        )


def _widen_buffers(model: PreTrainedModel) -> None:
    """Convert buffers that the family keeps in float32, which `from_config` may leave narrower."""
    kept = {*(model._keep_in_fp32_modules_strict or ()), "e_score_correction_bias"}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name in kept and buffer.dtype in (torch.float16, torch.bfloat16):
                setattr(module, name, buffer.float())


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise PlanError(
        "model.save_pretrained was called on a sharded model, of which this rank has parts. Call "
        "primeblocks.parallel.adapters.transformers.save_pretrained(model, folder) on every rank."
    )


def _own_configs(model: PreTrainedModel) -> None:
    """Copy configurations, which choose implementations, because other models may share them."""
    memo: dict[int, Any] = {}  # Configurations, and parts of them, that are shared stay shared.
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            module.config = copy.deepcopy(config, memo)
            # Parameters are numbers from here on, also if the checkpoint has float8 codes.
            vars(module.config).pop("quantization_config", None)


def _admit_sequence(
    kind: str, no_forks: str | None, module: PreTrainedModel, args: Any, arguments: dict[str, Any]
) -> None:
    """Refuse a plan that the model would follow wrongly."""
    arguments = _by_name(module, args) | arguments
    sequence = arguments.get("sequence")
    if sequence is None:
        return
    if getattr(sequence, "parents", None) is not None and no_forks is not None:
        raise UnsupportedError(
            f"{kind} cannot take a plan with parents: its {no_forks} per document, without forks. "
            "Pack whole rollouts for this family, without trees."
        )
    if arguments.get("position_ids") is None:
        raise PlanError(
            "a plan came without position_ids, and the model would count from this rank's first "
            "token. Call model(**local_inputs(tokens, sequence=plan, group=...))."
        )
    if arguments.get("attention_mask") is not None:
        raise PlanError(
            "attention over split sequences does not take masks, but documents. Leave padding out "
            "of the plan, and do not pass attention_mask."
        )
    if arguments.get("labels") is not None and arguments.get("shift_labels") is None:
        raise PlanError(
            "with labels=, the model would shift labels across documents and inside this rank's "
            "part. Shift labels before the split: "
            "shift_labels=sequence.split(sequence.labels(tokens), group=...)[None]."
        )


def _admit_loss(module: PreTrainedModel, args: Any, arguments: dict[str, Any]) -> None:
    """Refuse a loss of this rank's tokens only, which would look like the loss of all tokens."""
    arguments = _by_name(module, args) | arguments
    asked = arguments.get("output_router_logits")
    config = module.config.get_text_config()
    if getattr(config, "output_router_logits", False) if asked is None else asked:
        raise UnsupportedError(
            "output_router_logits computes an auxiliary loss from this rank's tokens only. The "
            "sum of these losses over ranks is not the loss of all tokens. Switch "
            "output_router_logits off, also in the configuration. Read the routers with forward "
            "hooks."
        )
    if arguments.get("labels") is not None and arguments.get("num_items_in_batch") is None:
        raise PlanError(
            "labels= divides by this rank's tokens, but gradients are sums over all ranks. Pass "
            "num_items_in_batch=global_token_count(...) too."
        )


def _by_name(module: PreTrainedModel, args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
