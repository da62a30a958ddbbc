"""Recurrent layers of transformers over split sequences.

transformers has no registry for these layers, so the forward of each such module is replaced. The
new forward computes the same result from the layer's parameters, with `parallel.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...linear import causal_conv1d, gated_delta_rule, state_space
from .attention import Context, sequence_of

__all__ = ["install_recurrence", "recurrent_layers"]


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that `install_recurrence` serves."""
    return [module for module in model.modules() if type(module).__name__ in _LAYERS]


def install_recurrence(
    model: nn.Module, context: Context, kernel: Callable[..., tuple[Tensor, Tensor]] | None
) -> None:
    """Pass the states of recurrent layers from rank to rank. Local.

    Args:
        kernel: the kernel of `gated_delta_rule` or `state_space`. None means plain torch.
    """
    chosen = {} if kernel is None else {"kernel": kernel}
    for module in recurrent_layers(model):
        layer = partial(_LAYERS[type(module).__name__], chosen=chosen)
        module.forward = partial(_forward, module, layer, context, module.forward)


def _forward(
    module: Any,
    layer: Callable[..., Tensor],
    context: Context,
    own: Callable[..., Tensor],
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> Tensor:
    """Run `layer` as transformers calls it, without a cache. Attention refuses a mask.

    `own` runs if a rank holds whole sequences and the call has no plan.
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
    mixed = F.silu(causal_conv1d(mixed, m.conv1d.weight.squeeze(1), m.conv1d.bias, **where))
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
    dt = F.softplus(dt + m.dt_bias.to(dt.dtype)).clamp(*m.time_step_limit)
    x = x.unflatten(-1, (m.num_heads, -1))
    out = state_space(x, dt, -_wide(m.A_log).exp(), b, c, m.D, **chosen, **where)
    return m.out_proj(m.norm(out.flatten(1), gate).to(hidden.dtype))


# Keys are class names. `FAMILIES` lists the models that were compared.
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
