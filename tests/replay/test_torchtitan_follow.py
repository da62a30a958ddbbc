"""torchtitan's own Qwen3 model, whose forward takes no routes; skipped where it is absent."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from primeblocks.replay import Routes, follow, impose, record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's imports warn of its own dependencies.
    qwen3 = pytest.importorskip("torchtitan.models.qwen3", exc_type=ImportError)

from primeblocks.replay.adapters.torchtitan import routers

# The router asks for float32 autocast, which CPUs do not have: it runs in the dtype given.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
TOKENS = torch.arange(32).reshape(2, 16)
POSITIONS = torch.arange(16).expand(2, 16)


class NoAttention(nn.Module):
    """In the place of FlexAttention, which runs on no CPU without being compiled."""

    def forward(self, x, masks, positions):
        return x


def build(implementation):
    torch.manual_seed(0)
    model = qwen3.qwen3_configs["debugmodel_moe"](attn_backend="flex").build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    for name in list(model.layers)[2:]:
        del model.layers[name]
    for name, layer in list(model.layers.items()):
        layer.attention = NoAttention()
        if implementation is not None:
            model.layers[name] = checkpoint_wrapper(layer, checkpoint_impl=implementation)
    return model


def foreign(found, seed):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(TOKENS.numel(), len(found), found[0].num_experts, generator=generator)
    return Routes.from_array(
        draws.topk(found[0].top_k).indices.numpy(),
        num_experts=found[0].num_experts,
        layer_ids=[router.layer_id for router in found],
        missing=np.arange(TOKENS.numel()) % 5 == 4,
    )


def loss(model, **rows):
    return model(TOKENS, positions=POSITIONS, **rows).float().log_softmax(-1)[..., 7].sum()


def gradients(model):
    names = [n.replace("_checkpoint_wrapped_module.", "") for n, _ in model.named_parameters()]
    return dict(zip(names, [p.grad for p in model.parameters()], strict=True))


@pytest.mark.parametrize(
    "implementation", [None, CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT]
)
def test_micro_batches_in_flight_have_the_bits_of_impose(implementation):
    plain = build(None)
    found = routers(plain)
    both = [foreign(found, seed) for seed in (1, 2)]
    for routes in both:
        with impose(found, routes):
            loss(plain).backward()
    model = build(implementation)
    found = routers(model)
    with follow(model, found):
        with record(found) as tape:
            first = loss(model, routed_experts=both[0].tensor(batch=2))
        second = loss(model, routed_experts=both[1].tensor(batch=2))
        first.backward()
        second.backward()
    known = ~both[0].missing
    assert np.array_equal(tape.routes.experts[known], both[0].experts[known])
    wanted = gradients(plain)
    for name, gradient in gradients(model).items():
        if "attention" not in name:
            assert torch.equal(gradient, wanted[name]), name
