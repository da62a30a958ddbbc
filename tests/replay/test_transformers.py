"""Real models of five families: own routes change no bit, other routes are followed."""

import pytest
import torch

from primeblocks.errors import UnsupportedError
from primeblocks.replay import Routes, compare, impose, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import tiny_models

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "glm4_moe", "gpt_oss")
TOKENS = torch.arange(4, 28).reshape(2, 12)


@pytest.fixture(name="model", params=FAMILIES)
def _model(request):
    return tiny_models.build(
        request.param, dtype=torch.float32, num_layers=3, hidden=64, num_experts=6
    ).train()


def run(model):
    """Logits, and every gradient of a loss that weighs the tokens differently."""
    model.zero_grad()
    logits = model(input_ids=TOKENS, use_cache=False).logits
    weights = torch.linspace(0, 1, logits.numel()).reshape(logits.shape)
    (logits * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def foreign_routes(model, seed=0):
    layers = routers(model)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(TOKENS.numel(), len(layers), 6, generator=generator).argsort(-1)[..., :2]
    return Routes.from_array(
        ids.numpy(), num_experts=6, layer_ids=[router.layer_id for router in layers]
    )


def test_own_routes_change_no_bit(model):
    with record(routers(model)) as tape:
        logits, grads = run(model)
    with impose(routers(model), tape.routes):
        again, grads_again = run(model)
    assert torch.equal(logits, again)
    assert grads.keys() == grads_again.keys()
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


def test_other_routes_are_followed_and_reach_the_gate(model):
    own, _ = run(model)
    routes = foreign_routes(model)
    with impose(routers(model), routes), record(routers(model)) as tape:
        logits, grads = run(model)
    assert compare(tape.routes, routes).overall == 1.0
    assert not torch.equal(own, logits)
    for router in routers(model):
        weight = next(n for n, m in model.named_modules() if m is router.module) + ".weight"
        assert grads[weight].abs().max() > 0
    # Nothing of it is left.
    assert torch.equal(run(model)[0], own)


def test_routers_are_in_layer_order_and_dense_layers_have_none():
    model = tiny_models.build("glm4_moe", dtype=torch.float32, num_layers=3, hidden=64)
    assert [router.layer_id for router in routers(model)] == [1, 2]


def test_a_model_without_routers_is_refused():
    with pytest.raises(UnsupportedError, match="qwen3_moe"):
        routers(torch.nn.Linear(2, 2))
