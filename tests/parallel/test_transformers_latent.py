"""Latent attention of transformers over split sequences: what travels, and where heads do."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from primeblocks.parallel import plan_mesh, plan_sequence
from primeblocks.parallel.attention import RectangleKernel, ring_attention, ulysses_attention
from primeblocks.testing import ranks, tiny_models
from primeblocks.testing.oracles import StepCounter
from tests.parallel.bodies import each

TOKENS, LAYERS, LATENT, ROPE = 32, 2, 512, 64


def _seen(family, attention, change=None):
    """Logits and gradients, and bytes received by hops and by trades of heads in the forward."""
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    sizes = {"num_layers": LAYERS, "hidden": 64, "vocab": 32}
    model = tiny_models.build(family, dtype="float32", **sizes).train()
    meshes = plan_mesh(world_size=2, context=2).build("cpu")
    if change is not None:
        change(model)
    parallelize(model, meshes, attention=attention)
    group = meshes.context.get_group()
    plan = plan_sequence([TOKENS], ranks=2, order="contiguous")
    inputs = local_inputs(torch.arange(TOKENS), sequence=plan, group=group)
    with StepCounter() as step:
        logits = model(**inputs).logits
    logits.square().sum().backward()
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    return (
        logits.detach(),
        grads,
        step.received_bytes["recv_"],
        step.received_bytes["alltoall_base_"],
    )


@dataclass
class _Own:
    """Some attention of the user's own, that no dictionary takes."""

    causal: bool = True

    def __call__(self, q, k, v, *, sequence, group, **more):
        return ring_attention(q, k, v, sequence=sequence, group=group, causal=self.causal, **more)


def _hooked(model, kind="register_forward_hook"):
    for layer in model.model.layers:
        getattr(layer.self_attn.kv_b_proj, kind)(lambda *_: None)


_hooked_after = partial(_hooked, kind="register_full_backward_hook")
_hooked_before = partial(_hooked, kind="register_full_backward_pre_hook")


def _lora(model):
    for layer in model.model.layers:
        own = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = nn.Sequential(own)


def test_latents_travel_and_ulysses_trades_queries_and_outputs_alone():
    kernel = partial(ring_attention, kernel=RectangleKernel(), check=False)
    cases = [("deepseek_v3", kernel), ("glm4_moe_lite", ring_attention)]
    cases.append(("deepseek_v3", ulysses_attention))
    heads, width = 2, 128 + 64 + 128  # Of queries and of outputs.
    for *rings, ulysses in ranks.run(each, _seen, cases):
        for found in rings:
            assert found[2] == LAYERS * TOKENS // 2 * 4 * (LATENT + ROPE)
        of_experts = rings[0][3]
        assert ulysses[3] - of_experts == LAYERS * TOKENS // 2 * heads // 2 * width * 4


def _heads_instead():
    """What takes more than the weight of `kv_b_proj`, or another attention, and its errors."""
    want, grads, latents, _ = _seen("deepseek_v3", ring_attention)
    errors = []
    for attention, change in [
        (_Own(), None), (ring_attention, _hooked), (ring_attention, _hooked_after),
        (ring_attention, _hooked_before), (ring_attention, _lora),
        (partial(ring_attention, causal=True), None),
    ]:  # fmt: skip
        got, found, received, _ = _seen("deepseek_v3", attention, change)
        assert received > latents
        errors.append(float((got - want).abs().max() / want.abs().max()))
        for name, grad in grads.items():
            other = found[name.replace("kv_b_proj.", "kv_b_proj.0.") if change is _lora else name]
            errors.append(float((other - grad).norm() / grad.norm().clamp_min(1e-20)))
    return max(errors)


def test_heads_travel_where_latents_cannot():
    # Sums of some hundred numbers in float32, in another order, through two layers.
    assert max(ranks.run(_heads_instead)) < 1e-4
