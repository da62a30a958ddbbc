"""torch.compile after `follow`. In ranks of their own: checked annotations cannot be compiled."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from primeblocks.errors import UsageError
from primeblocks.replay import follow, impose
from primeblocks.testing import ranks
from tests.replay.conftest import ToyModel
from tests.replay.test_follow import WAYS, Swallows, routers_of
from tests.replay.test_replay_compile import FLAG, _inputs, _routes


def _flight(model, seeds, sequence, call):
    """Gradients of several forwards whose backwards follow together; None is a plain forward."""
    model.zero_grad()
    total, leaves = 0, []
    for i, seed in enumerate(seeds):
        leaves.append(_inputs(i, sequence).requires_grad_())
        routes = None if seed is None else _routes(seed, 2 * sequence)
        total = total + call(model, leaves[-1], routes).square().sum()
    total.backward()
    return [leaf.grad for leaf in leaves] + [p.grad.clone() for p in model.parameters()]


def _by_argument(model, x, routes):
    return model(x) if routes is None else model(x, routed_experts=routes.tensor(batch=2))


def _by_context(model, x, routes):
    if routes is None:
        return model(x)
    with impose(model.routers, routes):
        return model(x)


def _compiled(way, whole, checkpoint):
    torch._dynamo.reset()
    setattr(torch._dynamo.config, FLAG, True)  # As torchtitan sets it, for checkpoints inside.
    model, counter = WAYS[way](checkpoint), CompileCounterWithBackend("aot_eager")
    following = follow(model, routers_of(model))
    for part in [model] if whole else model.layers:
        part.compile(backend=counter, fullgraph=True)
    eager, counts = ToyModel(), []
    # Shapes change, and are symbols from then on.
    for i, sequence in enumerate((4, 6, 7)):
        seeds = (i, i + 1, None)
        found = _flight(model, seeds, sequence, _by_argument)
        wanted = _flight(eager, seeds, sequence, _by_context)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        counts.append(counter.frame_count)
    following.close()
    return counts


@pytest.mark.parametrize(
    ("way", "whole", "checkpoint"),
    [
        ("handed on", True, False),
        ("handed on", False, False),
        ("wrapped", False, None),
    ],
)
def test_compiled_models_follow_with_code_they_share(way, whole, checkpoint, full):
    if way == "handed on" and not whole and not full:
        pytest.skip("layers that are compiled one by one and get keywords: --full")
    (counts,) = ranks.run(_compiled, way, whole, checkpoint, world_size=1)
    assert counts[1] == counts[2] <= 12, counts


def _not_handed_on():
    model = Swallows()
    follow(model, model.routers)
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="did not reach layers"):
        model(_inputs(0), routed_experts=_routes(0, 8).tensor(batch=2))


def test_rows_that_do_not_arrive_are_noticed_in_compiled_code_too():
    ranks.run(_not_handed_on, world_size=1)
