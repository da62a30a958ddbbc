"""torchtitan's linear layers and experts, converted."""

import warnings

import pytest
import torch

from primeblocks.fp8 import Recipe, Tile, WeightCache, grouped_matmul, matmul

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's imports warn of its own dependencies.
    try:
        from tests.parallel.torchtitan_on_cpu import moe
    except ImportError as error:
        pytest.skip(
            f"torchtitan's MoE module cannot be imported ({error})", allow_module_level=True
        )
    from torchtitan.models.common.linear import Linear

    from primeblocks.fp8.adapters.torchtitan import convert

RECIPE = Recipe(activations=Tile(1, 16), weights=Tile(16, 16))


def experts_and_linear():
    torch.manual_seed(0)
    experts = moe.GroupedExperts.Config(dim=32, hidden_dim=48, num_experts=4).build()
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    linear = Linear.Config(in_features=32, out_features=32).build()
    return torch.nn.ModuleDict({"experts": experts, "linear": linear})


def test_they_multiply_in_float8():
    net = experts_and_linear()
    names = list(net.state_dict())
    assert convert(net, RECIPE, only=".*") == ("experts", "linear")
    assert list(net.state_dict()) == names
    assert isinstance(net["linear"], Linear)
    cache = WeightCache(net, torch.optim.SGD(net.parameters()))
    x, counts = torch.randn(10, 32), torch.tensor([3, 0, 6, 1])
    offsets = counts.cumsum(0).int()
    w1, w2, w3 = (net["experts"].get_parameter(f"w{n}") for n in ("1_EFD", "2_EDF", "3_EFD"))

    def product(rows, weight):
        return grouped_matmul(rows, weight, offsets, recipe=RECIPE)

    expected = product(torch.nn.functional.silu(product(x, w1)) * product(x, w3), w2)
    for _ in range(2):
        assert torch.equal(net["experts"](x, counts), expected)
        linear = net["linear"]
        assert torch.equal(linear(x), matmul(x, linear.weight, recipe=RECIPE))
    assert cache.roundings == 4


def test_what_is_not_chosen_stays_torchtitans():
    net = experts_and_linear()
    assert convert(net, RECIPE, only="linear") == ("linear",)
    assert type(net["experts"]) is moe.GroupedExperts
    assert not hasattr(net["experts"], "grouped_mm")
