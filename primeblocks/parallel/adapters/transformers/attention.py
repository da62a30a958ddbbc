"""Attention of transformers over packed and split sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ....errors import PlanError, ShapeError, UnsupportedError
from ...attention import (
    latent_ring_attention,
    latent_ulysses_attention,
    ring_attention,
    ulysses_attention,
)
from ...sequence import SequencePlan

__all__ = ["Context", "has_hooks", "install_attention", "sequence_of", "use_attention"]

_IMPLEMENTATION = "primeblocks"


@dataclass(frozen=True)
class Context:
    """The ranks and the attention by which a model's sequences are split.

    Attributes:
        group: the ranks that share a sequence.
        attention: `ring_attention`, `ulysses_attention`, or a function with their signature.
    """

    group: dist.ProcessGroup
    attention: Callable[..., Tensor]


def install_attention(model: nn.Module, context: Context) -> None:
    """Let every attention of `model` attend to the tokens of all ranks. Local.

    If a rank holds whole sequences, a call without a plan keeps the model's own attention.
    """
    AttentionInterface.register(_IMPLEMENTATION, _forward)
    AttentionMaskInterface.register(_IMPLEMENTATION, _no_mask)
    for module in use_attention(_IMPLEMENTATION, model.modules(), context.group):
        module.context_parallel = context
        # A rank alone keeps the model's own expansion of latents, because nothing travels.
        if hasattr(module, "expand_kv") and context.group.size() > 1:
            module.expand_kv = partial(_keep_latents, module, module.expand_kv)


def use_attention(name: str, modules: Iterable[nn.Module], group: dist.ProcessGroup) -> list[Any]:
    """Let modules with a configuration choose a registered attention, and return them. Local.

    If a rank holds whole sequences, they choose it only for calls with a plan.
    """
    found: list[Any] = []
    for module in modules:
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "_attn_implementation"):
            continue
        found.append(module)
        if group.size() == 1:
            choose = partial(_choose, config._attn_implementation, name)
            module.register_forward_pre_hook(choose, with_kwargs=True)
        else:
            config._attn_implementation = name
    return found


def _choose(own: str, other: str, module: Any, args: Any, arguments: dict[str, Any]) -> None:
    """Choose for the module that is about to run, by its arguments.

    Masks are made in one module and used in others, and a checkpoint runs layers again after
    another call. Therefore no choice outlives its call.
    """
    chosen = own if arguments.get("sequence") is None else other
    if module.config._attn_implementation != chosen:
        module.config._attn_implementation = chosen


def sequence_of(module: Any, arguments: dict[str, Any], batch: int) -> SequencePlan:
    """Return the plan of the tokens, which the caller gave to the model.

    Raises:
        PlanError: the call has no plan.
        ShapeError: the batch has more than one row. Pack the documents into one row instead.
    """
    sequence = arguments.get("sequence")
    if not isinstance(sequence, SequencePlan):
        raise PlanError(
            f"{type(module).__name__} attends over split sequences and needs their plan: call "
            "model(**local_inputs(tokens, sequence=plan, group=...))."
        )
    if batch != 1:
        raise ShapeError(f"documents are packed into one row; got a batch of {batch}.")
    return sequence


def _no_mask(*sizes: Any, **arguments: Any) -> None:
    """Make no mask. A plan knows the documents, and `parallelize` refuses masks with a plan."""


def has_hooks(layer: nn.Module) -> bool:
    """Return whether a call does more than the layer's forward, also in backward. Local."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, kind) for kind in kinds)


def _of_latents(module: Any) -> Callable[..., Tensor] | None:
    """Return the latent form of the chosen attention, or None if keys and values must travel.

    The latent form takes the weight of `kv_b_proj` apart, so that layer must be a plain weight.
    """
    asked: Any = module.context_parallel.attention
    given: dict[str, Any] = {}
    if isinstance(asked, partial) and not asked.args:
        asked, given = asked.func, asked.keywords
    layer = getattr(module, "kv_b_proj", None)
    hooks = layer is not None and has_hooks(layer)
    plain = type(layer) is nn.Linear and "forward" not in vars(layer) and layer.bias is None
    if not plain or hooks or not given.keys() <= {"kernel", "check"}:
        return None
    found = next((latent for own, latent in _LATENT if own is asked), None)
    return None if found is None else partial(found, **given)


_LATENT: tuple[tuple[Callable[..., Tensor], Callable[..., Tensor]], ...] = (
    (ring_attention, latent_ring_attention),
    (ulysses_attention, latent_ulysses_attention),
)


def _keep_latents(
    module: Any, own: Callable[..., tuple[Tensor, Tensor]], latents: Tensor, rotated: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace `expand_kv`, so that `_forward` gets the latents of keys and values."""
    if _of_latents(module) is None:
        return own(latents, rotated)
    kv = torch.cat([latents, rotated], dim=-1)
    return kv, kv


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Run attention as transformers calls it, on `[batch, heads, tokens, head_dim]`."""
    sequence = sequence_of(module, arguments, query.shape[0])
    if dropout:
        raise PlanError(f"attention over split sequences has no dropout; got {dropout}. Use 0.")
    context: Context = module.context_parallel
    where = {"sequence": sequence, "group": context.group, "scale": scaling}
    over_latents = _of_latents(module) if "expand_kv" in vars(module) else None
    if over_latents is not None:
        if any(rule is not None for rule in (sliding_window, s_aux, softcap)):
            raise UnsupportedError("attention over latents has no windows, sinks or soft-caps.")
        up = module.kv_b_proj.weight.unflatten(0, (query.shape[1], -1))
        return over_latents(query[0].transpose(0, 1), key[0, 0], up, **where)[None], None
    out = context.attention(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        window=sliding_window,
        sinks=s_aux,
        **({} if softcap is None else {"softcap": softcap}),
        **where,
    )
    return out.unsqueeze(0), None
