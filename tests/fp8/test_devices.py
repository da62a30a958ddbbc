"""On each device: codes are those of the CPU, and layers and experts keep their error."""

import pytest
import torch

from primeblocks.fp8 import (
    Recipe,
    Tile,
    WeightCache,
    convert,
    grouped_matmul,
    matmul,
    quantize,
    swiglu_matmul,
)
from primeblocks.fp8.checkpoint import pack_weight, unpack_weights
from primeblocks.testing import tiny_models
from primeblocks.testing.oracles import assert_same_bits, max_relative_error
from tests.fp8 import test_cache

RECIPE = Recipe(wgrad="bfloat16")
# Of a product of two operands with 3 bits behind the point, whose terms cancel.
ERROR = 2 * 2**0.5 * 0.0265


def draw(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("tile", [Tile(1, 128), Tile(128, 128), Tile(1, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_codes_are_those_of_the_cpu(device, tile, dtype, scale):
    # Zeros, subnormals, and the largest numbers beside ordinary ones.
    x = draw(256, 384, seed=0).to(dtype)
    x[0], x[1, :7], x[2, 3] = 0.0, 1e-38, torch.finfo(dtype).max
    wanted = quantize(x, tile, scale=scale)
    found = quantize(x.to(device), tile, scale=scale)
    assert found.codes.device.type == device
    assert_same_bits(found.codes.cpu(), wanted.codes)
    assert_same_bits(found.scales.cpu(), wanted.scales)


def gradients(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))


def norm_error(found, right):
    return float((found.detach().cpu().double() - right.detach()).norm() / right.detach().norm())


@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_a_product_and_its_gradients(device, scale):
    x, weight = draw(96, 256, seed=1, scale=scale), draw(128, 256, seed=2)
    right = gradients(torch.nn.functional.linear, x, weight)
    found = gradients(
        lambda *leaves: matmul(*leaves, recipe=RECIPE),
        x.bfloat16().to(device),
        weight.bfloat16().to(device),
    )
    assert all(norm_error(*pair) < ERROR for pair in zip(found, right, strict=True))


def test_grouped_products_with_an_expert_that_nobody_chose(device):
    x, experts = draw(256, 128, seed=3), draw(3, 256, 128, seed=4)
    offsets = torch.tensor([128, 128, 256], dtype=torch.int32)

    def exact(x, experts):
        return torch.cat([x[:128] @ experts[0].mT, x[128:] @ experts[2].mT])

    right = gradients(exact, x, experts)
    found = gradients(
        lambda *leaves: grouped_matmul(*leaves, offsets.to(device), recipe=RECIPE),
        x.bfloat16().to(device),
        experts.bfloat16().to(device),
    )
    assert all(norm_error(*pair) < ERROR for pair in zip(found, right, strict=True))
    assert not found[2][1].any()


@pytest.mark.parametrize(("inner", "outer"), [(128, 64), (128, 100), (36, 64)])
def test_grouped_products_of_any_strides_and_sizes(device, inner, outer):
    offsets = torch.tensor([[40, 1], [96, 2]], dtype=torch.int32, device=device)[:, 0]
    leaves = draw(96, inner + 3, seed=8)[:, :inner], draw(2, outer, inner, seed=9)
    x, experts = (leaf.bfloat16().to(device).requires_grad_() for leaf in leaves)
    grouped_matmul(x, experts, offsets, recipe=RECIPE).sum().backward()  # An expanded gradient.
    right = torch.stack([x.detach().double()[rows].sum(0) for rows in (slice(40), slice(40, 96))])
    right = right[:, None].expand(2, outer, inner).cpu()
    assert norm_error(experts.grad.double().cpu(), right) < ERROR


@pytest.mark.parametrize("grouped", [False, True])
def test_a_product_after_a_swiglu_and_its_gradients(device, grouped):
    gate_up, scores = draw(256, 512, seed=5), draw(256, seed=6).sigmoid()
    weight = draw(2, 128, 256, seed=7) if grouped else draw(128, 256, seed=7)
    offsets = (torch.tensor([128, 256], dtype=torch.int32),) if grouped else ()

    def exact(gate_up, weight, scores):
        gate, up = gate_up.chunk(2, dim=-1)
        x = torch.nn.functional.silu(gate) * up * scores[:, None]
        return (
            torch.cat([x[:128] @ weight[0].mT, x[128:] @ weight[1].mT])
            if grouped
            else x @ weight.mT
        )

    def ours(gate_up, weight, scores):
        there = (each.to(device) for each in offsets)
        return swiglu_matmul(gate_up, weight, *there, recipe=RECIPE, scores=scores)

    leaves = gate_up, weight, scores
    right = gradients(exact, *leaves)
    found = gradients(ours, *(x.bfloat16().to(device) for x in leaves))
    assert all(norm_error(*pair) < ERROR for pair in zip(found, right, strict=True))


def test_packed_weights_are_those_of_the_cpu(device):
    recipe = Recipe(activations=Tile(1, 32), weights=Tile(16, 32))
    x = draw(3, 40, 70, seed=8).bfloat16()
    wanted, found = (
        pack_weight("a.weight", recipe.quantize_weight(each)) for each in (x, x.to(device))
    )
    for name, tensor in wanted.items():
        assert found[name].device.type == device
        assert_same_bits(found[name], tensor)
    assert unpack_weights(found, recipe)["a.weight"].codes.device.type == device


def test_a_weight_is_rounded_once_a_version(device):
    plain, cached = (test_cache.layers().to(device) for _ in range(2))
    x, make = draw(12, 32, seed=9).float().to(device), test_cache.OPTIMIZERS["AdamW"]
    optimizer = make(plain.parameters())
    expected = [test_cache.step(plain, optimizer, x) for _ in range(3)]
    optimizer = make(cached.parameters())
    with WeightCache(cached, optimizer) as cache:
        for losses in expected:
            assert test_cache.step(cached, optimizer, x) == losses
    assert cache.roundings == 6


def test_a_converted_model_steps_on_the_device(device):
    recipe = Recipe(activations=Tile(1, 32), weights=Tile(16, 32), source="float32")
    model = tiny_models.build("qwen3_moe", dtype=torch.float32, num_layers=2, hidden=64).to(device)
    tokens = torch.arange(4, 24, device=device).reshape(2, 10)
    plain = model(input_ids=tokens, use_cache=False).logits.detach()
    convert(model, recipe, only=r"self_attn\.[qkvo]_proj")
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.square().mean().backward()
    assert 1e-4 < max_relative_error(logits.detach(), plain) < 0.2
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
