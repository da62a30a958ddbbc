import numpy as np
import pytest
import torch

from primeblocks.errors import ShapeError, UsageError
from primeblocks.replay import impose, record


def test_record_inside_sees_the_imposed_choices_and_around_the_own(toy, inputs, foreign):
    model = toy(layers=1)
    with record(model.routers) as own:
        model(inputs)
    with (
        record(model.routers) as around,
        impose(model.routers, foreign(layers=1)),
        record(model.routers) as inside,
    ):
        model(inputs)
    known = ~foreign(layers=1).missing
    assert around.routes == own.routes
    assert np.array_equal(inside.routes.experts[known], foreign(layers=1).experts[known])
    assert np.array_equal(inside.routes.experts[~known], own.routes.experts[~known])


def test_one_record_is_one_forward(toy, inputs):
    model = toy()
    with record(model.routers) as tape:
        with pytest.raises(UsageError, match=r"\[0, 1, 2\] have not run"):
            _ = tape.routes
        model(inputs)
        with pytest.raises(UsageError, match="ran twice in one record: 8 tokens, then 4"):
            model(inputs[:1])
    assert tape.routes.tokens == 8


@pytest.mark.parametrize("other", [1, -1])
@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_a_second_forward_is_refused_whatever_it_chooses(toy, inputs, other, checkpoint):
    """Six decoding steps that chose alike were recorded as one."""
    model, step = toy(checkpoint=checkpoint), inputs[:1, :1].clone().requires_grad_()
    with record(model.routers) as tape:
        loss = model(step).sum()
        with pytest.raises(UsageError, match="layer 0 ran twice .*1 tokens, then 1.*generate"):
            model(other * step)
        loss.backward()
        with pytest.raises(UsageError, match="layer 0 ran twice"):
            model(step)
    assert tape.routes.tokens == 1


def recompute_otherwise(model, inputs, *, error=None):
    with record(model.routers) as tape:
        loss = model(inputs.clone().requires_grad_()).sum()
        model.routers[0].weight.data.neg_()
        loss.backward()
        with pytest.raises(UsageError, match="with other choices"):
            _ = tape.routes
        if error is not None:
            raise error


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_with_other_choices_is_refused(toy, inputs, reentrant):
    with pytest.raises(UsageError, match="layer 0 was recomputed in backward with other choices"):
        recompute_otherwise(toy(checkpoint=reentrant), inputs)


def test_an_error_of_the_body_is_not_covered_up(toy, inputs):
    with pytest.raises(ZeroDivisionError):
        recompute_otherwise(toy(checkpoint=True), inputs, error=ZeroDivisionError())


@pytest.mark.parametrize("part", [0, 1])
def test_what_is_no_choice_is_refused(toy, inputs, foreign, monkeypatch, part):
    """Scores for ids would be recorded as numbers cut short."""
    model = toy(layers=1)
    monkeypatch.setattr(type(model.routers[0]), "experts", lambda self, output: output[part])
    message = r"layer 0: Router.experts must return integers \[tokens, 2\]; got torch.float64"
    with record(model.routers), pytest.raises(ShapeError, match=message):
        model(inputs)
    with pytest.raises(ShapeError, match=message), impose(model.routers, foreign(layers=1)):
        model(inputs)


def test_layers_that_saw_other_tokens_are_refused(toy, inputs):
    model = toy(layers=2)
    with record(model.routers) as tape:
        model.layers[0](inputs)
        model.layers[1](inputs[:1])
    with pytest.raises(ShapeError, match=r"\{0: 8, 1: 4\}"):
        _ = tape.routes


def test_many_experts_are_recorded_in_sixteen_bits(toy, inputs):
    model = toy(layers=1)
    router = model.routers[0]
    router.num_experts = 300
    router.weight = torch.nn.Parameter(torch.zeros(300, 5, dtype=torch.float64))
    router.weight.data[298:] = torch.randn(2, 5, dtype=torch.float64)
    with record([router]) as tape:
        router(inputs.reshape(-1, 5))
    assert tape.routes.experts.dtype == np.uint16
    assert tape.routes.experts.max() >= 298


@pytest.mark.parametrize("kind", ["softmax", "chosen", "sigmoid"])
@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_gates_are_those_of_the_forward(toy, inputs, kind, checkpoint):
    model = toy(kind, checkpoint=checkpoint)
    seen = {}

    def look(router, args, output):
        seen[router.layer_id] = output[1].detach().float()

    for router in model.routers:
        router.register_forward_hook(look)
    with record(model.routers, gates=True) as tape:
        model(inputs.clone().requires_grad_()).sum().backward()
    assert tape.gates.dtype == np.float32
    assert tape.gates.shape == tape.routes.experts.shape
    for layer in range(3):
        assert np.array_equal(tape.gates[:, layer], seen[layer].numpy())


def test_gates_are_opt_in(toy, inputs):
    model = toy()
    with record(model.routers) as tape:
        model(inputs)
    with pytest.raises(UsageError, match=r"record\(routers, gates=True\)"):
        _ = tape.gates
    with (
        record(model.routers, gates=True) as tape,
        pytest.raises(UsageError, match="have not run"),
    ):
        _ = tape.gates
