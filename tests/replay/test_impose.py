import inspect
from dataclasses import dataclass
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch

from primeblocks import replay
from primeblocks.errors import PlanError, ShapeError, UsageError
from primeblocks.replay import Routes, allow_compile, impose, record
from primeblocks.replay.impose import _upload
from primeblocks.replay.router import check_routers
from tests.replay.reference import sigmoid_router, softmax_router

KINDS = ["softmax", "renormalised", "chosen", "sigmoid"]
CHECKPOINTS = [None, False, True]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def step(model, x):
    """Output, and gradients of every weight and of the input."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return out.detach(), gradients(model) | {"input": x.grad}


def reference_step(model, x, imposed):
    """The same by loops over tokens and slots; imposed: choices by layer, None where missing."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    tokens = leaf.reshape(-1, leaf.shape[-1])
    for layer, choices in zip(model.layers, imposed, strict=True):
        router = layer.gate
        if router.kind == "sigmoid":
            gates, ids = sigmoid_router(
                tokens,
                router.weight,
                top_k=2,
                correction_bias=router.bias,
                renormalise=True,
                scale=1.5,
                imposed=choices,
            )
        else:
            gates, ids = softmax_router(
                tokens,
                router.weight,
                top_k=2,
                renormalise=router.kind != "softmax",
                imposed=choices,
            )
        tokens = torch.stack(
            [
                token + sum(gates[t, k] * (token @ layer.weight[e]) for k, e in enumerate(ids[t]))
                for t, token in enumerate(tokens)
            ]
        )
    tokens.square().sum().backward()
    return tokens.reshape(x.shape).detach(), gradients(model) | {"input": leaf.grad}


def choices_of(routes):
    return [
        [
            None if missing else row
            for row, missing in zip(
                routes.experts[:, layer].tolist(), routes.missing.tolist(), strict=True
            )
        ]
        for layer in range(len(routes.layer_ids))
    ]


def assert_equal(a, b):
    assert torch.equal(a[0], b[0])
    for name in a[1]:
        assert torch.equal(a[1][name], b[1][name]), name


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_foreign_routes_equal_the_reference_gradients_included(
    toy, inputs, foreign, kind, checkpoint
):
    model = toy(kind, checkpoint=checkpoint)
    routes = foreign()
    with impose(model.routers, routes):
        found = step(model, inputs)
    expected = reference_step(model, inputs, choices_of(routes))
    assert_close(found, expected)
    assert all(found[1][f"layers.{i}.gate.weight"].abs().max() > 0 for i in range(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_own_routes_change_no_bit(toy, inputs, kind, checkpoint):
    model = toy(kind, checkpoint=checkpoint)
    with record(model.routers) as tape:
        own = step(model, inputs)
    with impose(model.routers, tape.routes):
        assert_equal(step(model, inputs), own)


def test_the_order_of_slots_is_kept(toy, inputs, foreign):
    model = toy()
    routes = foreign()
    turned = Routes.from_array(
        routes.experts[..., ::-1].copy(), num_experts=6, layer_ids=range(3), missing=routes.missing
    )
    with impose(model.routers, routes), record(model.routers) as tape:
        out, grads = step(model, inputs)
    with impose(model.routers, turned), record(model.routers) as other:
        assert_close(step(model, inputs), (out, grads))
    known = ~routes.missing
    assert np.array_equal(tape.routes.experts[known], routes.experts[known])
    assert np.array_equal(other.routes.experts[known], routes.experts[known][..., ::-1])


def test_allowing_compilation_twice_leaves_one_hook(toy):
    model = toy()
    allow_compile(model.routers)
    allow_compile(model.routers)
    assert [len(router._forward_hooks) for router in model.routers] == [1, 1, 1]


def test_hooks_are_gone_after_the_context_and_after_an_error(toy, inputs, foreign):
    model = toy()
    own = step(model, inputs)
    with impose(model.routers, foreign()):
        assert not torch.equal(model(inputs), own[0])
    assert_equal(step(model, inputs), own)
    with pytest.raises(ZeroDivisionError), impose(model.routers, foreign()):
        raise ZeroDivisionError
    assert_equal(step(model, inputs), own)


def interleave(model, x, first, second):
    """Both forwards before both backwards, the second context still open."""
    with impose(model.routers, first):
        loss = model(x.clone().requires_grad_()).square().sum()
    with impose(model.routers, second):
        loss = loss + model(-x.clone().requires_grad_()).square().sum()
        loss.backward()


def test_backward_may_come_later_without_checkpointing(toy, inputs, foreign):
    model = toy()
    interleave(model, inputs, foreign(seed=2), foreign(seed=3))
    late = gradients(model)
    model.zero_grad()
    for x, seed in ((inputs, 2), (-inputs, 3)):
        with impose(model.routers, foreign(seed=seed)):
            model(x).square().sum().backward()
    assert_close(late, gradients(model))


def test_recomputation_under_foreign_routes_is_refused(toy, inputs, foreign):
    model = toy(checkpoint=False)
    with pytest.raises(UsageError, match="recomputed under the routes of another"):
        interleave(model, inputs, foreign(seed=2), foreign(seed=3))


def test_recomputation_without_routes_is_refused(toy, inputs, foreign):
    model = toy(checkpoint=False)
    with impose(model.routers, foreign()):
        loss = model(inputs.clone().requires_grad_()).square().sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()
    model.reentrant = True
    with (
        pytest.raises(UsageError, match="call backward inside"),
        impose(model.routers, foreign()),
    ):
        model(inputs.clone().requires_grad_())


@pytest.mark.parametrize("checkpoint", [None, False])
def test_evaluation_needs_no_backward(toy, inputs, foreign, checkpoint):
    model = toy(checkpoint=checkpoint)
    with torch.no_grad(), impose(model.routers, foreign()):
        model(inputs)
    model.eval()
    with impose(model.routers, foreign()), torch.no_grad():
        model(inputs)


def documented_router():
    """`MyRouter` as docs/replay.md has it."""
    blocks = Path(__file__).parents[2].joinpath("docs/replay.md").read_text().split("```python\n")
    (code,) = (block.split("```")[0] for block in blocks if "class MyRouter" in block)
    names = {"dataclass": dataclass, "nn": torch.nn, "replay": replay}
    exec(code, names)
    return names["MyRouter"]


class HalfRouter(torch.nn.Module):
    """Returns its gates in the dtype of the model, as most do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 5).bfloat16())

    def forward(self, hidden):
        logits = hidden @ self.weight.T
        ids = logits.topk(2).indices
        gates = logits.softmax(-1, dtype=torch.float32).gather(-1, ids)
        return logits, (gates / gates.sum(-1, keepdim=True)).bfloat16(), ids


def test_the_documented_router_changes_no_bit_in_bfloat16(inputs):
    torch.manual_seed(0)
    module, hidden = HalfRouter(), inputs.reshape(-1, 5).bfloat16()
    routers = [documented_router()(module, 0, 6, 2)]
    with record(routers) as tape:
        own = module(hidden)
    with impose(routers, tape.routes):
        replayed = module(hidden)
    for a, b in zip(own, replayed, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("gates", "found"),
    [
        (lambda gates: gates.float(), r"replace puts torch.float32 \[8, 2\] .* torch.bfloat16"),
        (lambda gates: gates.double(), r"replace puts torch.float64 \[8, 2\] .* torch.bfloat16"),
        (lambda gates: gates[:, :1], r"gates returns \[8, 1\] for choices \[8, 2\]"),
        (lambda gates: gates.T, r"gates returns \[2, 8\]"),
    ],
)
@pytest.mark.parametrize(
    "recorded", [None, np.ones((8, 1, 2), np.float32)], ids=["live", "recorded"]
)
def test_gates_of_another_dtype_or_shape_are_refused(inputs, foreign, gates, found, recorded):
    documented = documented_router()

    class Wrong(documented):
        def gates(self, output, experts):
            return gates(documented.gates(self, output, experts))

    module = HalfRouter()
    with (
        pytest.raises(ShapeError, match=rf"layer 0: Router.{found}"),
        impose([Wrong(module, 0, 6, 2)], foreign(layers=1), gates=recorded),
    ):
        module(inputs.reshape(-1, 5).bfloat16())


def test_other_numbers_of_tokens_are_refused(toy, inputs, foreign):
    model, routes = toy(), foreign()
    longer = Routes.join([routes, routes[:1]])
    for other, said in (
        (routes[:7], r"7\. .* call with_missing\(after=\), or pad if all added .* are padding"),
        (longer, r"9\. .* cut its routes to its tokens .* routes\[:8\]"),
    ):
        with (
            pytest.raises(ShapeError, match="8 tokens, but the routes have " + said),
            impose(model.routers, other),
        ):
            model(inputs)


def test_routes_of_another_model_are_refused(toy, foreign, monkeypatch):
    model = toy()
    for routers, layers, message in (
        (model.routers, 2, "select_layers"),
        (model.routers[:2], 3, r"in layers \(0, 1\), but the routes are for layers \(0, 1, 2\)"),
    ):
        with pytest.raises(PlanError, match=message), impose(routers, foreign(layers=layers)):
            pass
    with impose(model.routers[:1], foreign().select_layers([0])):
        model.layers[0](torch.randn(8, 5, dtype=torch.float64))
    for name, value, found in (("num_experts", 7, "2 of 7"), ("top_k", 3, "3 of 6")):
        with monkeypatch.context() as patch:
            patch.setattr(model.routers[0], name, value)
            message = f"{found} experts, but the routes have 2 of 6"
            imposed = impose(model.routers[:1], foreign().select_layers([0]))
            with pytest.raises(PlanError, match=message), imposed:
                pass


def test_a_router_that_never_ran_is_reported(toy, foreign):
    model = toy()
    with pytest.raises(UsageError, match="layer 0 never ran"), impose(model.routers, foreign()):
        pass


def test_routers_are_checked(toy):
    model = toy()
    model.layers[1].gate.layer_id = 0
    with pytest.raises(PlanError, match=r"share a layer: \[0, 0, 2\]"):
        check_routers(model.routers)
    model.layers[1].gate.layer_id = 1
    model.layers[1].gate.top_k = 3
    with pytest.raises(PlanError, match=r"\[\(6, 2\), \(6, 3\)\]"):
        check_routers(model.routers)
    with pytest.raises(UsageError, match="no choices to replay"):
        check_routers([])
    with pytest.raises(UsageError, match="not the ToyModel itself"):
        inspect.unwrap(check_routers)(model)


def test_arrays_are_no_routes(toy, foreign, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # As for a caller.
    said = "routes must be Routes, .* got ndarray. .* Routes.from_array"
    with pytest.raises(UsageError, match=said), impose(toy().routers, foreign().experts):
        pass


def test_each_device_gets_the_columns_that_it_needs():
    array = np.arange(2 * 3 * 2, dtype=np.uint16).reshape(2, 3, 2)
    one, two = torch.device("cpu"), torch.device("cpu", 0)
    for devices in ([one, one, one], [one, two, one]):
        columns = _upload(array, devices, [2, 0, 1])
        for column, tensor in zip([2, 0, 1], columns, strict=True):
            assert tensor.dtype == torch.uint16
            assert tensor.tolist() == array[:, column].tolist()
    assert columns[1].stride() == (2, 1)  # Not a part of three columns.


def test_rows_for_weights_without_a_device_stay_on_the_host(toy, inputs, foreign):
    model = toy(layers=1)
    with impose(model.routers, foreign(layers=1)):
        wanted = model(inputs)
    weight = model.routers[0].weight
    model.routers[0].to("meta")
    with impose(model.routers, foreign(layers=1)):
        model.routers[0].weight, model.routers[0].bias = weight, torch.zeros(6)
        assert torch.equal(model(inputs), wanted)
