"""What `impose` does on demand: gates replayed too, implausible experts replaced."""

import numpy as np
import pytest
import torch

from primeblocks.errors import ShapeError, UsageError
from primeblocks.replay import Routes, allow_compile, compare, impose, record
from tests.replay.test_impose import CHECKPOINTS, assert_equal, step


def drawn_gates(shape, seed=5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).numpy()


def test_gates_replay_the_values_and_keep_the_live_gradients(toy, inputs, foreign):
    model, routes = toy("sigmoid", layers=1), foreign(layers=1)
    router, tokens = model.routers[0], inputs.reshape(8, -1)
    recorded = drawn_gates(routes.experts.shape)
    with impose([router], routes):
        _, live, _ = router(tokens)
    with impose([router], routes, gates=torch.from_numpy(recorded)):
        _, replayed, ids = router(tokens)
    known = ~routes.missing
    assert ids[known].tolist() == routes.experts[known, 0].tolist()
    assert torch.equal(replayed[known], torch.from_numpy(recorded[known, 0]).double())
    assert torch.equal(replayed[~known], live[~known])
    weights = torch.randn(live.shape, dtype=live.dtype)
    (wanted,) = torch.autograd.grad((live * weights).sum(), router.weight)
    (found,) = torch.autograd.grad((replayed * weights).sum(), router.weight)
    assert found.abs().max() > 0
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_recorded_gates_close_the_loop(toy, inputs, checkpoint):
    """Identical ids are not identical arithmetic; ids and gates are."""
    inputs = inputs.float()
    engine, trainer = toy("sigmoid").float(), toy("sigmoid", checkpoint=checkpoint).float()
    for layer in trainer.layers:
        layer.gate.weight.data *= 1.01
    with record(engine.routers, gates=True) as tape:
        wanted = engine(inputs)
    with impose(trainer.routers, tape.routes):
        assert not torch.allclose(step(trainer, inputs)[0], wanted)
    with impose(trainer.routers, tape.routes, gates=tape.gates):
        found, gradients = step(trainer, inputs)
    assert torch.equal(found, wanted)
    assert all(gradients[f"layers.{i}.gate.weight"].abs().max() > 0 for i in range(3))


def test_gates_that_do_not_fit_are_refused(toy, foreign):
    model, routes = toy(), foreign()
    for gates, found in (
        (drawn_gates((8, 3, 1)), r"float32 \[8, 3, 1\]"),
        (drawn_gates((8, 3, 2)).astype(np.float64), r"float64 \[8, 3, 2\]"),
        (torch.rand(8, 3, 2).bfloat16(), r"bfloat16 \[8, 3, 2\]"),
    ):
        with (
            pytest.raises(ShapeError, match=r"float32 \[8, 3, 2\], as the routes; got " + found),
            impose(model.routers, routes, gates=gates),
        ):
            pass
    with (
        pytest.raises(UsageError, match="not both"),
        impose(model.routers, routes, gates=drawn_gates((8, 3, 2)), min_score_ratio=0.5),
    ):
        pass


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_implausible_experts_are_replaced_and_counted(toy, inputs, foreign, checkpoint):
    model, routes = toy("sigmoid", checkpoint=checkpoint), foreign()
    with (
        record(model.routers) as own,
        impose(model.routers, routes, min_score_ratio=1.0) as imposed,
        record(model.routers) as tape,
    ):
        with pytest.raises(UsageError, match=r"\[0, 1, 2\] have not run"):
            _ = imposed.replacement_rate
        step(model, inputs)
    known = ~routes.missing
    assert np.array_equal(tape.routes.experts[~known], own.routes.experts[~known])
    changed = tape.routes.experts[known] != routes.experts[known]
    rates = {layer: changed[:, layer].mean() for layer in range(3)}
    assert imposed.replacement_rates == pytest.approx(rates)
    assert imposed.replacement_rate == pytest.approx(changed.mean())
    assert 0 < changed.mean() < 1
    with impose(model.routers, routes) as imposed:
        step(model, inputs)
    assert imposed.replacement_rates == {0: 0, 1: 0, 2: 0}


def test_padding_is_neither_filtered_nor_counted(toy, inputs, foreign):
    model, parts = toy("sigmoid"), foreign().split([4, 4])
    routes = Routes.join([part[:length].pad(4) for part, length in zip(parts, (2, 3), strict=True)])
    with (
        impose(model.routers, routes, min_score_ratio=1.0) as imposed,
        record(model.routers) as tape,
    ):
        model(inputs)
    known = ~routes.padding
    changed = tape.routes.experts[known] != routes.experts[known]
    assert not routes.missing.any()
    assert np.array_equal(tape.routes.experts[routes.padding], routes.experts[routes.padding])
    assert compare(routes, tape.routes).tokens == 5
    assert imposed.replacement_rate == pytest.approx(changed.mean())
    assert 0 < changed.mean() < 1


@pytest.mark.parametrize("ratio", [0.0, 1.5, float("nan")])
def test_ratios_out_of_range_are_refused(toy, foreign, ratio):
    model = toy()
    with (
        pytest.raises(UsageError, match=r"\(0, 1\]; got"),
        impose(model.routers, foreign(), min_score_ratio=ratio),
    ):
        pass


def test_rates_of_nothing_known_are_zero(toy, inputs, foreign):
    model = toy()
    routes = foreign()[:0].with_missing(after=8)
    with impose(model.routers, routes, min_score_ratio=1.0) as imposed:
        model(inputs)
    assert imposed.replacement_rate == 0


def test_layers_are_found_by_their_ids(toy, inputs, foreign):
    model, routes = toy("sigmoid"), foreign()
    gates = drawn_gates(routes.experts.shape)
    with impose(model.routers, routes, gates=gates):
        wanted = step(model, inputs)
    order = [2, 0, 1]
    with impose(model.routers[::-1], routes.select_layers(order), gates=gates[:, order]):
        assert_equal(step(model, inputs), wanted)


def test_gates_are_copied_on_entering(toy, inputs, foreign):
    model, routes = toy("sigmoid"), foreign()
    gates = drawn_gates(routes.experts.shape)
    with impose(model.routers, routes, gates=gates):
        wanted = step(model, inputs)
    with impose(model.routers, routes, gates=gates):
        gates[:] = 0
        assert_equal(step(model, inputs), wanted)


def test_the_one_known_slot_counts_in_full(toy, inputs):
    model = toy(layers=1)
    (router,) = model.routers
    router.top_k = 1
    with record([router]) as own:
        model(inputs)
    worst = (own.routes.experts + 1) % router.num_experts
    routes = Routes.from_array(worst, num_experts=6, layer_ids=[0], missing=np.arange(8) > 0)
    with impose([router], routes, min_score_ratio=1.0) as imposed:
        model(inputs)
    assert imposed.replacement_rates == {0: 1.0}


def test_a_second_context_is_found_behind_other_hooks(toy, inputs, foreign):
    model = toy()
    allow_compile(model.routers)
    with impose(model.routers, foreign()):
        with (
            pytest.raises(UsageError, match="already under impose"),
            impose(model.routers, foreign()),
        ):
            pass
        model(inputs)
