"""Conversion of a real model, alone and under FSDP2, and rounding on the way to an engine."""

import numpy as np
import pytest
import torch

from primeblocks.errors import PlanError, UsageError
from primeblocks.fp8 import Fp8Linear, Recipe, Tile, convert, encode_weights, round_trip
from primeblocks.layout import Layout, Shard
from primeblocks.testing import ranks, tiny_models

RECIPE = Recipe(activations=Tile(1, 32), weights=Tile(16, 32))
ONLY = r"self_attn\.[qkvo]_proj"
TOKENS = torch.arange(4, 24).reshape(2, 10)


def model():
    return tiny_models.build("qwen3_moe", dtype=torch.float32, num_layers=2, hidden=64)


def logits_after_a_step(net):
    """What a weight rounded before the step and kept would get wrong."""
    optimizer = torch.optim.SGD(net.parameters(), lr=3.0)
    optimizer.step()
    with torch.no_grad():
        return net(input_ids=TOKENS, use_cache=False).logits


def logits_and_gradient(net):
    logits = net(input_ids=TOKENS, use_cache=False).logits
    logits.square().mean().backward()
    grad = net.model.layers[0].self_attn.q_proj.weight.grad
    return logits.detach(), grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def test_names_and_parameters_stay():
    net = model()
    before = dict(net.named_parameters())
    seen = []
    layer = net.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    names = convert(net, RECIPE, only=ONLY)
    assert len(names) == 8
    assert all(isinstance(net.get_submodule(name), Fp8Linear) for name in names)
    after = dict(net.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    net(input_ids=TOKENS)
    assert seen == ["hook"]


def test_a_layer_under_two_names_is_one_layer():
    linear = torch.nn.Linear(32, 32)
    net = torch.nn.Sequential(linear, linear)
    assert convert(net, RECIPE, only="") == ("0",)
    assert net[0] is net[1]
    assert isinstance(net[1], Fp8Linear)
    alone = torch.nn.Linear(32, 32)
    assert convert(alone, RECIPE, only="") == ("",)
    assert isinstance(alone, Fp8Linear)


def test_it_computes_with_the_rounded_weights():
    exact, rounded = model(), model()
    convert(rounded, RECIPE, only=ONLY)
    a, _ = logits_and_gradient(exact)
    b, _ = logits_and_gradient(rounded)
    error = float((a - b).norm() / a.norm())
    assert 1e-4 < error < 0.1


def test_a_rule_that_matches_nothing_is_refused():
    with pytest.raises(UsageError, match="matches none of"):
        convert(model(), RECIPE, only="no_such_layer")


def sharded_on_this_rank():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    convert(net, RECIPE, only=ONLY)
    mesh = init_device_mesh("cpu", (2,))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    logits, gradient = logits_and_gradient(net)
    encode = encode_weights(RECIPE, only=ONLY)
    name = "model.layers.0.self_attn.q_proj.weight"
    local = dict(net.named_parameters())[name].to_local()
    encoded = encode(name, local.detach())[name].numpy()
    return logits.numpy(), gradient.numpy(), logits_after_a_step(net).numpy(), encoded


def whole_on_this_rank():
    net = model()
    convert(net, RECIPE, only=ONLY)
    logits, gradient = logits_and_gradient(net)
    return logits.numpy(), gradient.numpy(), logits_after_a_step(net).numpy()


def test_it_works_under_fsdp2_and_shards_round_as_the_whole():
    # On a rank too: another number of threads adds in another order.
    ((logits, gradient, stepped),) = ranks.run(whole_on_this_rank, world_size=1)
    weight = model().model.layers[0].self_attn.q_proj.weight.detach()
    results = ranks.run(sharded_on_this_rank, world_size=2)
    moved = np.linalg.norm(stepped - logits)
    assert moved > 0.01 * np.linalg.norm(logits)
    for theirs, their_gradient, their_stepped, _ in results:
        assert np.array_equal(theirs, logits)
        np.testing.assert_allclose(their_gradient, gradient, rtol=1e-6, atol=1e-9)
        assert np.linalg.norm(their_stepped - stepped) < 0.01 * moved
    shards = np.concatenate([encoded for *_, encoded in results])
    assert np.array_equal(shards, round_trip(weight, RECIPE.weights).numpy())


def test_only_matching_matrices_are_encoded():
    encode = encode_weights(RECIPE, only="proj")
    x = torch.randn(16, 32)
    assert torch.equal(encode("a.proj", x)["a.proj"], round_trip(x, RECIPE.weights))
    assert encode("a.norm", x)["a.norm"] is x
    assert encode("a.proj", x[0])["a.proj"].shape == (32,)


@pytest.mark.parametrize(("rows", "fits"), [((0, 16), True), ((16, 40), True), ((0, 24), False)])
def test_shards_cut_through_a_tile_are_refused(rows, fits):
    start, end = rows
    layout = Layout((40, 64), Shard((start, 0), (end - start, 64)))

    def encoder(name):
        return encode_weights(RECIPE, only="proj", layouts={name: layout})

    encoder("a.norm")
    if fits:
        encoder("a.proj")
        return
    with pytest.raises(PlanError, match="holds 0:24 of 40"):
        encoder("a.proj")
