"""Attention and recurrent layers of transformers over packed and split sequences.

transformers has a registry of attention functions, but not of recurrent layers, so the forward of
each recurrent module is replaced. The new forward computes the same result from the layer's
parameters, with `parallel.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import ACT2FN

from ....errors import PlanError, ShapeError, UnsupportedError
from ...attention import (
    latent_ring_attention,
    latent_ulysses_attention,
    ring_attention,
    ulysses_attention,
)
from ...linear import causal_conv1d, gated_delta_rule, state_space
from ...sequence import SequencePlan

__all__ = [
    "Context",
    "has_hooks",
    "install_attention",
    "install_recurrence",
    "recurrent_layers",
    "sequence_of",
    "use_attention",
]

_IMPLEMENTATION = "primeblocks"


@dataclass(frozen=True)
class Context:
    """The ranks that share a sequence, and the attention over its parts."""

    group: dist.ProcessGroup
    attention: Callable[..., Tensor]


def install_attention(model: nn.Module, context: Context) -> None:
    """Let every attention of `model` attend to the tokens of all ranks. Local.

    In a group of one rank, a call without a plan keeps the model's own attention.
    """
    AttentionInterface.register(_IMPLEMENTATION, _forward)
    AttentionMaskInterface.register(_IMPLEMENTATION, _no_mask)
    for module in use_attention(_IMPLEMENTATION, model.modules(), context.group):
        module.context_parallel = context
        # A group of one rank keeps the model's own expansion of latents, because nothing travels.
        if hasattr(module, "expand_kv") and context.group.size() > 1:
            module.expand_kv = partial(_keep_latents, module, module.expand_kv)


def use_attention(name: str, modules: Iterable[nn.Module], group: dist.ProcessGroup) -> list[Any]:
    """Let modules with a configuration use the attention `name`, and return these modules. Local.

    In a group of one rank, they use this attention only for calls with a plan.
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
    """Choose the attention of the module that is about to run, by the arguments of its call.

    Every call chooses anew, because a mask is made in one module and used in other modules. Also, a
    checkpoint may run a layer again after another call of the model.
    """
    chosen = own if arguments.get("sequence") is None else other
    if module.config._attn_implementation != chosen:
        module.config._attn_implementation = chosen


def sequence_of(module: Any, arguments: dict[str, Any], batch: int) -> SequencePlan:
    """Return the plan of the tokens, which the caller must have given to the model."""
    sequence = arguments.get("sequence")
    if not isinstance(sequence, SequencePlan):
        raise PlanError(
            f"{type(module).__name__} attends over split sequences and needs their plan: call "
            "model(**local_inputs(tokens, sequence=plan, group=...))."
        )
    if batch != 1:
        raise ShapeError(f"documents must be packed into one row; got a batch of {batch}.")
    return sequence


def _no_mask(*sizes: Any, **arguments: Any) -> None:
    """Make no mask. A plan knows the documents, and `parallelize` refuses masks with a plan."""


def has_hooks(layer: nn.Module) -> bool:
    """Return whether hooks would run in a call of the layer, or in its backward. Local."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, kind) for kind in kinds)


def _of_latents(module: Any) -> Callable[..., Tensor] | None:
    """Return the latent form of the chosen attention, or None if keys and values must travel.

    The latent form splits the weight of `kv_b_proj`, so `kv_b_proj` must be a plain `nn.Linear`.
    """
    asked: Any = module.context_parallel.attention
    given: dict[str, Any] = {}
    if isinstance(asked, partial) and not asked.args:
        asked, given = asked.func, asked.keywords
    layer: Any = getattr(module, "kv_b_proj", None)
    plain = type(layer) is nn.Linear and "forward" not in vars(layer) and layer.bias is None
    if not plain or has_hooks(layer) or not given.keys() <= {"kernel", "check"}:
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
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Run attention as transformers calls it, on `[batch, heads, tokens, head_dim]`."""
    sequence = sequence_of(module, arguments, query.shape[0])
    # Qwen2-MoE has the window in the layer, and passes it only in the mask.
    window = arguments.get("sliding_window", getattr(module, "sliding_window", None))
    if dropout:
        raise PlanError(
            f"attention over split sequences does not support dropout; got {dropout}. Use 0."
        )
    context: Context = module.context_parallel
    where = {"sequence": sequence, "group": context.group, "scale": scaling}
    over_latents = _of_latents(module) if "expand_kv" in vars(module) else None
    if over_latents is not None:
        if any(rule is not None for rule in (window, s_aux, softcap)):
            raise UnsupportedError("attention over latents has no windows, sinks or soft-caps.")
        up = module.kv_b_proj.weight.unflatten(0, (query.shape[1], -1))
        return over_latents(query[0].transpose(0, 1), key[0, 0], up, **where)[None], None
    out = context.attention(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        window=window,
        sinks=s_aux,
        **({} if softcap is None else {"softcap": softcap}),
        **where,
    )
    return out.unsqueeze(0), None


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that `install_recurrence` serves."""
    return [module for module in model.modules() if type(module).__name__ in _LAYERS]


def install_recurrence(
    model: nn.Module, context: Context, kernel: Callable[..., tuple[Tensor, Tensor]] | None
) -> None:
    """Let the recurrent layers of `model` pass their states from rank to rank. Local."""
    chosen = {} if kernel is None else {"kernel": kernel}
    for module in recurrent_layers(model):
        layer = partial(_LAYERS[type(module).__name__], chosen=chosen)
        module.forward = partial(_run_recurrence, module, layer, context, module.forward)


def _run_recurrence(
    module: Any,
    layer: Callable[..., Tensor],
    context: Context,
    own: Callable[..., Tensor],
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> Tensor:
    """Run `layer` as transformers calls it, without a cache. With a plan there is never a mask.

    In a group of one rank, `own` runs if the call has no plan.
    """
    if context.group.size() == 1 and arguments.get("sequence") is None:
        masked = {"cache_params": cache_params, "attention_mask": attention_mask}
        return own(hidden_states, **masked, **arguments)
    sequence = sequence_of(module, arguments, hidden_states.shape[0])
    return layer(module, hidden_states[0], sequence=sequence, group=context.group).unsqueeze(0)


def _qwen3_5(m: Any, hidden: Tensor, chosen: dict[str, Any], **where: Any) -> Tensor:
    mixed, z, b, a = (f(hidden) for f in (m.in_proj_qkv, m.in_proj_z, m.in_proj_b, m.in_proj_a))
    return _delta_net(m, mixed, z, b, a, chosen, **where)


def _qwen3_next(m: Any, hidden: Tensor, chosen: dict[str, Any], **where: Any) -> Tensor:
    projected = m.in_proj_qkvz(hidden[None]), m.in_proj_ba(hidden[None])
    q, k, v, z, b, a = (x[0] for x in m.fix_query_key_value_ordering(*projected))
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
    return _delta_net(m, mixed, z.flatten(1), b, a, chosen, **where)


def _delta_net(
    m: Any, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, chosen: dict[str, Any], **where: Any
) -> Tensor:
    convolved = causal_conv1d(mixed, m.conv1d.weight.squeeze(1), m.conv1d.bias, **where)
    mixed = ACT2FN[m.activation](convolved)
    q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
    q, k = (_unit(x.unflatten(-1, (-1, m.head_k_dim))) for x in (q, k))
    q, k = (x.repeat_interleave(m.num_v_heads // m.num_k_heads, dim=1) for x in (q, k))
    g = -_wide(m.A_log).exp() * F.softplus(_wide(a) + m.dt_bias)
    v = v.unflatten(-1, (-1, m.head_v_dim))
    out = gated_delta_rule(q, k, v, g, b.sigmoid(), **chosen, **where)
    out = m.norm(out.reshape(-1, m.head_v_dim), z.reshape(-1, m.head_v_dim))
    return m.out_proj(out.view(-1, m.value_dim))


def _nemotron_h(m: Any, hidden: Tensor, chosen: dict[str, Any], **where: Any) -> Tensor:
    sizes = [m.intermediate_size, m.conv_dim, m.num_heads]
    gate, mixed, dt = m.in_proj(hidden).split(sizes, dim=-1)
    mixed = m.act(causal_conv1d(mixed, m.conv1d.weight.squeeze(1), m.conv1d.bias, **where))
    states = m.n_groups * m.ssm_state_size
    x, b, c = mixed.split([m.intermediate_size, states, states], dim=-1)
    b, c = (t.unflatten(-1, (m.n_groups, -1)) for t in (b, c))
    dt = F.softplus(_wide(dt) + m.dt_bias).clamp(*m.time_step_limit)
    x = x.unflatten(-1, (m.num_heads, -1))
    out = state_space(x, dt, -_wide(m.A_log).exp(), b, c, m.D, **chosen, **where)
    return m.out_proj(m.norm(out.flatten(1), gate).to(hidden.dtype))


# Keys are class names. `FAMILIES` lists the families that tests compare.
_LAYERS: dict[str, Callable[..., Tensor]] = {
    "NemotronHMamba2Mixer": _nemotron_h,
    "Qwen3NextGatedDeltaNet": _qwen3_next,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5,
}


def _unit(x: Tensor) -> Tensor:
    """Scale to length 1, with the epsilon of transformers and flash-linear-attention."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
