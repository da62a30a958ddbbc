"""Layers of transformers over a split sequence against the same layers on whole documents."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.linear import causal_conv1d, gated_delta_rule, state_space
from primeblocks.parallel.linear.kernels import chunk_gated_delta_rule, chunk_state_space
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.float64 import Float64

LENGTHS, HIDDEN = [2, 9, 1, 12], 16
LINEAR = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention"],
}
MAMBA = {
    "hidden_size": HIDDEN,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 5,
    "chunk_size": 4,
    "layers_block_type": ["mamba"],
}


def _layer(name):
    torch.manual_seed(0)
    if name == "nemotron_h":
        layer = nemotron.NemotronHMamba2Mixer(NemotronHConfig(**MAMBA), layer_idx=0)
    elif name == "qwen3_next":
        layer = qwen3_next.Qwen3NextGatedDeltaNet(Qwen3NextConfig(**LINEAR), layer_idx=0)
    else:
        layer = qwen3_5.Qwen3_5MoeGatedDeltaNet(Qwen3_5MoeTextConfig(**LINEAR), layer_idx=0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.double()


def _gated_delta_net(layer, hidden, *, kernel, **where):
    """`forward` of Qwen3-Next's and Qwen3.5's, for one rank's `[1, tokens, hidden]`."""
    if hasattr(layer, "in_proj_qkv"):
        mixed, z = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)
        a, b = layer.in_proj_a(hidden), layer.in_proj_b(hidden)
    else:
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
        )
        mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    conv = layer.conv1d
    mixed = F.silu(causal_conv1d(mixed[0], conv.weight.squeeze(1), conv.bias, **where))
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    q, k, v = (
        x.unflatten(-1, (-1, dim))
        for x, dim in zip(
            mixed.split(sizes, dim=-1),
            (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim),
            strict=True,
        )
    )
    q, k = (x.repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=1) for x in (q, k))
    g = -layer.A_log.float().exp() * F.softplus(a[0].float() + layer.dt_bias)
    out = gated_delta_rule(q, k, v, g, b[0].sigmoid(), kernel=kernel, **where)
    out = layer.norm(out.flatten(0, 1), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(out.view(1, -1, layer.value_dim))


def _mamba2(layer, hidden, *, kernel, **where):
    """`forward` of Nemotron-H's mixer, for one rank's `[1, tokens, hidden]`."""
    gate, mixed, dt = layer.in_proj(hidden).split(
        [layer.intermediate_size, layer.conv_dim, layer.num_heads], dim=-1
    )
    conv = layer.conv1d
    mixed = layer.act(causal_conv1d(mixed[0], conv.weight.squeeze(1), conv.bias, **where))
    states = layer.n_groups * layer.ssm_state_size
    x, B, C = mixed.split([layer.intermediate_size, states, states], dim=-1)
    dt = F.softplus(dt[0] + layer.dt_bias.to(dt.dtype)).clamp(*layer.time_step_limit)
    B, C = (t.unflatten(-1, (layer.n_groups, -1)) for t in (B, C))
    A = -layer.A_log.float().exp()
    x = x.unflatten(-1, (layer.num_heads, -1))
    out = state_space(x, dt, A, B, C, layer.D, kernel=kernel, **where)
    return layer.out_proj(layer.norm(out.flatten(1).unsqueeze(0), gate).to(hidden.dtype))


def _normalised(q, k, v, **more):
    """Our kernel, where the model normalises inside of its own."""
    return chunk_gated_delta_rule(qwen3_5.l2norm(q), qwen3_5.l2norm(k), v, **more)


def _kernels(name):
    if name == "nemotron_h":
        theirs = partial(nemotron.mamba2_chunk_scan, chunk_size=4, return_final_states=True)
        return _mamba2, {"ours": chunk_state_space, "theirs": theirs}
    modeling = qwen3_next if name == "qwen3_next" else qwen3_5
    theirs = partial(
        modeling.torch_chunk_gated_delta_rule,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        chunk_size=4,
    )
    return _gated_delta_net, {"ours": _normalised, "theirs": theirs}


def _drawn():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 1, sum(LENGTHS), HIDDEN, generator=generator, dtype=torch.float64)


def _split_layer(name, order):
    """By kernel: this rank's output, its gradient, and all ranks' gradients of parameters."""
    group = dist.group.WORLD
    plan = plan_sequence(LENGTHS, ranks=group.size(), order=order, chunk_tokens=4)
    forward, kernels = _kernels(name)
    results = {}
    for who, kernel in kernels.items():
        layer = _layer(name)
        hidden, cotangent = (plan.split(x, group=group, dim=1) for x in _drawn())
        hidden.requires_grad_()
        with Float64():
            out = forward(layer, hidden, kernel=kernel, sequence=plan, group=group)
            out.backward(cotangent)
        grads = {}
        for key, parameter in layer.named_parameters():
            dist.all_reduce(parameter.grad)
            grads[key] = parameter.grad
        results[who] = out.detach(), hidden.grad, grads
    return results


def _whole_layer(name):
    layer = _layer(name)
    hidden, cotangent = _drawn()
    hidden.requires_grad_()
    with Float64():
        out = torch.cat([layer(part) for part in hidden.split(LENGTHS, dim=1)], dim=1)
        out.backward(cotangent)
    grads = {key: parameter.grad for key, parameter in layer.named_parameters()}
    return out.detach(), hidden.grad, grads


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize(("world_size", "order"), [(1, "contiguous"), (3, "zigzag")])
def test_layer_equals_that_of_transformers(name, world_size, order):
    found = ranks.run(_split_layer, name, order, world_size=world_size)
    plan = plan_sequence(LENGTHS, ranks=world_size, order=order, chunk_tokens=4)
    out, grad, grads = _whole_layer(name)
    for rank, by_kernel in enumerate(found):
        own = plan.indices(rank)
        for ours, our_grad, our_grads in by_kernel.values():
            assert_close_float64([ours, our_grad], [out[:, own], grad[:, own]])
            assert_close_float64(list(our_grads.values()), [grads[key] for key in our_grads])
