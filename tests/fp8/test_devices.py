"""On each device: codes are those of the CPU, and layers and experts keep their error."""

import pytest
import torch

from primeblocks.fp8 import Recipe, Tile, convert, grouped_matmul, matmul, quantize
from primeblocks.testing import tiny_models
from primeblocks.testing.oracles import assert_same_bits, max_relative_error

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


def test_a_converted_model_steps_on_the_device(device):
    recipe = Recipe(activations=Tile(1, 32), weights=Tile(16, 32), source="float32")
    model = tiny_models.build("qwen3_moe", dtype=torch.float32, num_layers=2, hidden=64).to(device)
    tokens = torch.arange(4, 24, device=device).reshape(2, 10)
    plain = model(input_ids=tokens, use_cache=False).logits.detach()
    convert(model, recipe, only=r"self_attn\.[qkvo]_proj")
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.square().mean().backward()
    assert 0 < max_relative_error(logits.detach(), plain) < 0.2
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
