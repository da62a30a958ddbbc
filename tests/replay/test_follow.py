"""Routes as an argument: against `impose`, which has its own oracles, and against naive ways."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from primeblocks.errors import PlanError, ShapeError, UsageError
from primeblocks.replay import Routes, follow, impose, record
from tests.replay.conftest import ToyModel

KINDS = ["softmax", "renormalised", "chosen", "sigmoid"]
CHECKPOINTS = [None, False, True]


class Model(ToyModel):
    """Hands keywords on to its layers, in a checkpoint or not."""

    def forward(self, x, **kwargs):
        for layer in self.layers:
            run = partial(layer, **kwargs)
            x = (
                run(x)
                if self.reentrant is None
                else checkpoint(run, x, use_reentrant=self.reentrant)
            )
        return x


def wrapped(reentrant):
    """A model that hands nothing on, its layers wrapped as torchtitan wraps them."""
    model = ToyModel()
    if reentrant is not None:
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=kind)
    return model


WAYS = {
    "handed on": lambda reentrant: Model(checkpoint=reentrant),
    "wrapped": wrapped,
}


def routers_of(model):
    return [m for m in model.modules() if hasattr(m, "kind")]


def outcome(model, out, x):
    names = [
        name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()
    ]
    grads = [p.grad.clone() for p in model.parameters()]
    return [out.detach(), x.grad], dict(zip(names, grads, strict=True))


def step(model, x, **kwargs):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x, **kwargs)
    out.square().sum().backward()
    return outcome(model, out, x)


def assert_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        assert torch.equal(a[1][name], b[1][name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", CHECKPOINTS)
def test_an_argument_gives_the_bits_of_impose(inputs, foreign, kind, reentrant):
    routes, plain = foreign(), ToyModel(kind)
    with impose(plain.routers, routes), record(plain.routers) as expected:
        wanted = step(plain, inputs)
    model = Model(kind, checkpoint=reentrant)
    with follow(model, model.routers), record(model.routers) as tape:
        found = step(model, inputs, routed_experts=routes.tensor(batch=2))
    assert_equal(found, wanted)
    assert tape.routes == expected.routes
    assert_equal(step(model, inputs), step(plain, inputs))  # The hooks are gone.


@pytest.mark.parametrize("reentrant", CHECKPOINTS)
def test_layers_are_given_what_the_model_does_not_hand_on(inputs, foreign, reentrant):
    routes, plain = foreign(), ToyModel()
    own = step(plain, inputs)
    with impose(plain.routers, routes):
        wanted = step(plain, inputs)
    model = wrapped(reentrant)
    with follow(model, routers_of(model)):
        assert_equal(step(model, inputs, routed_experts=routes.tensor(batch=2)), wanted)
        assert_equal(step(model, inputs), own)
        assert_equal(step(model, inputs, routed_experts=None), own)


def batches(inputs, foreign, count=3):
    return [((i + 1) * inputs, foreign(seed=i + 2)) for i in range(count)]


def one_at_a_time(inputs, foreign):
    model = ToyModel()
    leaves = []
    for x, routes in batches(inputs, foreign):
        leaves.append(x.clone().requires_grad_())
        with impose(model.routers, routes):
            model(leaves[-1]).square().sum().backward()
    return [leaf.grad for leaf in leaves], {n: p.grad for n, p in model.named_parameters()}


def in_flight(model, inputs, foreign, order, call):
    """All forwards, then the backwards in some order."""
    work = batches(inputs, foreign)
    leaves = [x.clone().requires_grad_() for x, _ in work]
    losses = [
        call(model, x, routes).square().sum() for x, (_, routes) in zip(leaves, work, strict=True)
    ]
    for i in order:
        losses[i].backward()
    (_, grads) = outcome(model, losses[0], leaves[0])
    return [leaf.grad for leaf in leaves], grads


def by_argument(model, x, routes):
    return model(x, routed_experts=routes.tensor(batch=2))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("reentrant", CHECKPOINTS)
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_in_flight_keep_their_rows(inputs, foreign, way, reentrant, order):
    model = WAYS[way](reentrant)
    with follow(model, routers_of(model)):
        found = in_flight(model, inputs, foreign, order, by_argument)
    torch.testing.assert_close(found, one_at_a_time(inputs, foreign), rtol=1e-12, atol=1e-12)


def _without_missing(foreign, seed):
    routes = foreign(seed=seed)
    return Routes(routes.experts, 6, routes.layer_ids, np.zeros(8, dtype=np.bool_))


@pytest.mark.parametrize("reentrant", CHECKPOINTS)
def test_recorded_gates_travel_too(inputs, foreign, reentrant):
    routes, plain = foreign(), ToyModel()
    gates = torch.rand(8, 3, 2, generator=torch.Generator().manual_seed(5))
    with impose(plain.routers, routes, gates=gates):
        wanted = step(plain, inputs)
    model = Model(checkpoint=reentrant)
    with follow(model, model.routers):
        rows = {
            "routed_experts": routes.tensor(batch=2),
            "routed_experts_weights": gates.view(2, 4, 3, 2),
        }
        assert_equal(step(model, inputs, **rows), wanted)


def test_a_row_may_be_missing_in_one_layer_only(inputs, foreign):
    model, rows = Model(), foreign().tensor(batch=2)
    rows[0, 1, 2] = -1
    with record(model.routers) as own:
        model(inputs)
    with follow(model, model.routers), record(model.routers) as tape:
        model(inputs, routed_experts=rows)
    assert np.array_equal(tape.routes.experts[1, :2], rows[0, 1, :2])
    # Not the choice of the plain run: the layers before were imposed.
    assert not np.array_equal(own.routes.experts[1, :2], rows[0, 1, :2])
    assert (tape.routes.experts[1, 2] < 6).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_rows_may_be_any_integers_and_have_other_layers_too(inputs, foreign, dtype):
    routes = _without_missing(partial(foreign, layers=3), 2)
    model = Model()
    with impose(model.routers, routes):
        wanted = step(model, inputs)
    # As prime-rl has them: a row for each layer, dense ones included.
    rows = torch.zeros(2, 4, 5, 2, dtype=dtype)
    rows[:, :, [4, 0, 2]] = routes.tensor(batch=2).to(dtype)
    with follow(model, model.routers, layer_ids=[1, 7, 2, 9, 0]):
        assert_equal(step(model, inputs, routed_experts=rows), wanted)


@pytest.mark.parametrize("layers", [(0,), (1, 2), (2,)])
def test_a_part_of_the_model_takes_a_part_of_the_rows(inputs, foreign, layers):
    routes, whole = foreign(), Model()
    part = Model()
    part.layers = nn.ModuleList(whole.layers[i] for i in layers)
    with impose(part.routers, routes.select_layers(layers)):
        wanted = step(part, inputs)
    with follow(part, part.routers):
        rows = routes.select_layers(layers).tensor(batch=2)
        assert_equal(step(part, inputs, routed_experts=rows), wanted)
    with follow(part, part.routers, layer_ids=routes.layer_ids):
        assert_equal(step(part, inputs, routed_experts=routes.tensor(batch=2)), wanted)
    with follow(part, part.routers), pytest.raises(ShapeError, match=r"select_layers"):
        part(inputs, routed_experts=routes.tensor(batch=2))


class Dense(nn.Module):
    """Takes no keywords."""

    def forward(self, x):
        return 2 * x


def test_layers_without_a_router_are_spared_the_argument(inputs, foreign):
    model, plain = Model(), ToyModel()
    for each in (model, plain):
        each.layers.insert(0, Dense())
    routes = foreign()
    with impose(routers_of(plain), routes):
        wanted = step(plain, inputs)
    with follow(model, routers_of(model)):
        assert_equal(step(model, inputs, routed_experts=routes.tensor(batch=2)), wanted)


def test_no_tokens(foreign):
    model = Model()
    with follow(model, model.routers):
        out = model(
            torch.zeros(1, 0, 5, dtype=torch.float64), routed_experts=foreign()[:0].tensor()
        )
    assert out.shape == (1, 0, 5)


class Swallows(Model):
    def forward(self, x, **kwargs):
        return super().forward(x)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = ToyModel(layers=1).layers[0]


def test_what_cannot_work_is_refused(inputs, foreign):
    rows, model = foreign().tensor(batch=2), Model()
    with pytest.raises(PlanError, match=r"layer 0 is not inside this Model"):
        follow(Model(), model.routers)
    with pytest.raises(PlanError, match=r"including \[1, 2\]"):
        follow(model, model.routers, layer_ids=[0])
    bare = Bare()
    with pytest.raises(UsageError, match="'layer.gate' is not in an nn.ModuleList"):
        follow(bare, [bare.layer.gate])
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in [*model.modules(), bare])
    following = follow(model, model.routers)
    with pytest.raises(UsageError, match=r"\[0, 1, 2\] already follow"):
        follow(model, model.routers)
    with pytest.raises(UsageError, match="under impose"), impose(model.routers, foreign()):
        model(inputs, routed_experts=rows)
    with pytest.raises(UsageError, match="needs routed_experts. Pass both"):
        model(inputs, routed_experts_weights=rows.double())
    for wrong in (foreign(), rows.numpy()):
        with pytest.raises(UsageError, match="must be a tensor, as Routes.tensor"):
            model(inputs, routed_experts=wrong)
    for wrong in (rows.double(), rows[0], rows[:, :, :2], rows[..., :1], rows > 0, rows * 1j):
        with pytest.raises(ShapeError, match=r"integers \[batch, sequence, 3 layers, 2\]"):
            model(inputs, routed_experts=wrong)
    with pytest.raises(UsageError, match="name experts 6 to 6, but the layer has experts 0 to 5"):
        model(inputs, routed_experts=torch.full_like(rows, 6))
    for wrong in (rows, rows.bfloat16(), rows.half()):
        with pytest.raises(
            ShapeError, match=r"weights must be float32 .*cast_forward_inputs=False"
        ):
            model(inputs, routed_experts=rows, routed_experts_weights=wrong)
    for wrong in (rows.double()[:1, :1], rows.double().transpose(0, 1)):
        with pytest.raises(ShapeError, match=r"weights must have shape \[2, 4, 3, 2\]"):
            model(inputs, routed_experts=rows, routed_experts_weights=wrong)
    for wrong in (rows.transpose(0, 1), rows.view(1, 8, 3, 2)):
        with pytest.raises(ShapeError, match=r"layer 0 runs on .* \[2, 4\], .* have \["):
            model(inputs, routed_experts=wrong)
    with pytest.raises(ShapeError, match="runs on 8 tokens, but the routes have 4"):
        model(inputs, routed_experts=rows[:1])
    following.close()
    following.close()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_rows_that_are_not_handed_on_are_noticed(inputs, foreign):
    model = Swallows()
    with follow(model, model.routers):
        model(inputs)
        with pytest.raises(UsageError, match=r"did not reach layers \[0, 1, 2\].*Swallows.forward"):
            model(inputs, routed_experts=foreign().tensor(batch=2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_forward_that_hands_nothing_on_is_noticed(inputs, foreign, reentrant):
    model = ToyModel(checkpoint=reentrant)
    with follow(model, model.routers):
        out = model(inputs.requires_grad_(), routed_experts=foreign().tensor(batch=2))
        with pytest.raises(UsageError, match="outside of its model's call"):
            out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_a_layer_is_noticed(inputs, foreign, reentrant):
    model = Model()
    for router in model.routers:
        router.forward = partial(checkpoint, router.forward, use_reentrant=reentrant)
    rows = foreign().tensor(batch=2)
    with follow(model, model.routers):  # The hook is outside this checkpoint: it may stay.
        model(inputs.requires_grad_(), routed_experts=rows).sum().backward()
    for layer in model.layers:
        gate = layer.gate
        layer.gate = nn.Module()
        layer.gate.inner = gate
        layer.gate.forward = partial(checkpoint, gate, use_reentrant=reentrant)
    with follow(model, [layer.gate.inner for layer in model.layers]):
        out = model(inputs, routed_experts=rows)
        with pytest.raises(UsageError, match="layer 2 runs without its layer"):
            out.sum().backward()


def test_an_error_in_the_forward_leaves_nothing_behind(inputs, foreign):
    model, rows = wrapped(None), foreign().tensor(batch=2)
    own = step(model, inputs)

    def fail(*_):
        raise MemoryError

    router = model.layers[1].gate
    with follow(model, model.routers):
        failing = router.register_forward_pre_hook(fail)  # After the layer's call.
        with pytest.raises(MemoryError):
            model(inputs, routed_experts=rows)
        failing.remove()
        with pytest.raises(UsageError, match="layer 1 runs without its layer"):
            router(inputs.flatten(0, 1))
        assert_equal(step(model, inputs), own)
