"""Products after a SwiGLU; autocast, compilation, rows that are nobody's, what is refused."""

import dataclasses

import pytest
import torch

from primeblocks.errors import ShapeError, UnsupportedError
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
from primeblocks.fp8.quantize import swiglu
from primeblocks.fp8.reference import ReferenceGemm, SimulatedGemm
from primeblocks.testing import ranks
from tests.fp8.test_matmul import KINDS, OFFSETS, RECIPE, SMALL, matrix, relative


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_swiglu_and_product_are_one_after_the_other(kind, scored, grouped):
    recipe = Recipe(**{**SMALL, **kind})
    inputs = [matrix(12, 64), matrix(4, 16, 32, seed=1) if grouped else matrix(16, 32, seed=1)]
    inputs += [matrix(12, seed=2)] if scored else []
    dy = matrix(12, 16, seed=3)
    found = []
    for fused in (True, False):
        gate_up, weight, *scores = (one.clone().requires_grad_() for one in inputs)
        offsets = (OFFSETS,) if grouped else ()
        if fused:
            also = {"scores": scores[0]} if scored else {}
            y = swiglu_matmul(gate_up, weight, *offsets, recipe=recipe, **also)
        else:
            product = grouped_matmul if grouped else matmul
            # Backward computes the activation again, and so rounds no code of it twice.
            exact = (
                dataclasses.replace(recipe, saved="input") if kind["wgrad"] != "float8" else recipe
            )
            y = product(swiglu(gate_up, *scores), weight, *offsets, recipe=exact)
        found.append([y, *torch.autograd.grad(y, (gate_up, weight, *scores), dy)])
    assert all(map(torch.equal, *found))


def test_swiglu_is_torchs():
    gate_up, scores = matrix(7, 20).double(), matrix(7, seed=1).double()
    gate, up = gate_up.chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up * scores[:, None]
    assert relative(swiglu(gate_up.float(), scores.float()), exact) < 1e-6
    far = torch.tensor([[-120.0, 1.0]]).requires_grad_()  # its exponential is no float32
    (gradient,) = torch.autograd.grad(swiglu(far).sum(), far)
    assert gradient.isfinite().all()


def test_of_a_swiglu_only_its_input_is_kept():
    gate_up, weight = matrix(12, 64).requires_grad_(), matrix(16, 32, seed=1).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)), lambda t: t
    ):
        swiglu_matmul(gate_up, weight, recipe=RECIPE)
    assert kept == [(32, 16), (2, 2), (12, 64)]


@pytest.mark.parametrize(
    ("rows", "weight", "scores"),
    [((4, 32), (8, 32), 4), ((4, 64), (2, 8, 32), 4), ((4, 64), (8, 32), 3)],
)
def test_swiglus_that_do_not_fit_are_refused(rows, weight, scores):
    with pytest.raises(ShapeError, match="not a pair|one number for each"):
        swiglu_matmul(matrix(*rows), matrix(*weight), recipe=RECIPE, scores=matrix(scores))


@pytest.mark.parametrize("engine", [ReferenceGemm(), SimulatedGemm()])
def test_autocast_gives_its_dtype_and_changes_no_product(engine):
    recipe = Recipe(**SMALL, gemm=engine)
    weight, experts = matrix(16, 32, seed=1), matrix(4, 16, 32, seed=2)
    gate_up = matrix(12, 64, seed=3)
    calls = {
        "dense": lambda x, g: matmul(x, weight.requires_grad_(), recipe=recipe),
        "grouped": lambda x, g: grouped_matmul(x, experts, OFFSETS, recipe=recipe),
        "swiglu": lambda x, g: swiglu_matmul(g, weight, recipe=recipe),
    }
    for call in calls.values():
        x, g = matrix(12, 32).requires_grad_(), gate_up.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(x, g)
            found = torch.autograd.grad(y.float().square().sum(), (x, g), allow_unused=True)
        assert y.dtype == torch.bfloat16
        x, g = x.detach().requires_grad_(), g.detach().requires_grad_()
        expected = call(x.bfloat16(), g.bfloat16())
        assert torch.equal(y, expected)
        wanted = torch.autograd.grad(expected.float().square().sum(), (x, g), allow_unused=True)
        pairs = zip(found, wanted, strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs)


def _compiled():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))
    convert(net, RECIPE, only=".*")
    x = torch.randn(6, 32)
    plain = net(x)
    same = torch.equal(torch.compile(net, backend="aot_eager")(x), plain)
    loss = torch.compile(net, backend="aot_eager")(x).square().sum()
    with WeightCache(net, torch.optim.SGD(net.parameters())) as cache:
        for call in (
            lambda: cache.codes(net[0], "weight", net[0].weight),
            lambda: quantize(x, Tile(1, 32)),
        ):
            with pytest.raises(RuntimeError, match="function `disable` .* not be traced") as error:
                torch.compile(call, backend="eager", fullgraph=True)()
            assert "matmul.py" not in str(error.value)  # Codes are not traced in parts.
    return same, bool(torch.autograd.grad(loss, net[0].weight)[0].norm() > 0)


def test_a_compiled_model_goes_around_it():
    assert ranks.run(_compiled, world_size=1) == [(True, True)]


WITH_OTHERS = [{"nonfinite": "raise"}, {"activations": Tile(4, 16)}]  # rows share checks or tiles


@pytest.mark.parametrize("kind", [*KINDS, *WITH_OTHERS])
@pytest.mark.parametrize("junk", [1e6, torch.nan])
def test_rows_past_the_last_offset_may_hold_anything(kind, junk):
    recipe = Recipe(**{**SMALL, **kind})
    operands = [matrix(12, 64), matrix(12, seed=1), matrix(12, 16, seed=2)]
    found = []
    for tail in (0.0, junk):
        gate_up, scores, dy = (one.clone() for one in operands)
        gate_up[10:], scores[10:], dy[10:] = tail, tail, tail
        weights = [matrix(4, 16, 32, seed=3), matrix(4, 16, 64, seed=4)]
        inputs = [one.requires_grad_() for one in (gate_up, scores, *weights)]
        gate_up, scores, down, other = inputs
        y = swiglu_matmul(gate_up, down, OFFSETS, recipe=recipe, scores=scores)
        y = torch.cat([y, grouped_matmul(gate_up, other, OFFSETS, recipe=recipe)], dim=1)
        found.append([y, *torch.autograd.grad(y, inputs, torch.cat([dy, dy], dim=1))])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["dense", "grouped", "swiglu", "grouped swiglu"])
@pytest.mark.parametrize("by", ["input", "weight"])
def test_gradients_of_gradients_are_refused(name, by):
    x, offsets = matrix(12, 64), OFFSETS if "grouped" in name else None
    inner = 32 if "swiglu" in name else 64
    weight = matrix(*([4] if "grouped" in name else []), 16, inner, seed=1)
    multiply = swiglu_matmul if "swiglu" in name else matmul if offsets is None else grouped_matmul
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    y = multiply(*inputs, *([] if multiply is matmul else [offsets]), recipe=RECIPE)
    wanted = inputs[by == "weight"]
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(y.sum(), wanted, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype):
    x, experts = matrix(12, 32), matrix(4, 16, 32, seed=1)
    for engine in (ReferenceGemm(), SimulatedGemm()):
        recipe = Recipe(**SMALL, gemm=engine, wgrad="float8")
        found = []
        for default in (torch.float32, dtype):
            torch.set_default_dtype(default)
            try:
                inputs = [x.clone().requires_grad_(), experts.clone().requires_grad_()]
                y = grouped_matmul(*inputs, OFFSETS, recipe=recipe)
                found.append([y, *torch.autograd.grad(y.sum(), inputs)])
            finally:
                torch.set_default_dtype(torch.float32)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64])
def test_codes_and_integers_are_no_operands(dtype):
    with pytest.raises(ShapeError, match="the weight must be floating-point numbers"):
        matmul(matrix(4, 32), matrix(16, 32).to(dtype), recipe=RECIPE)
    with pytest.raises(ShapeError, match="x must be floating-point numbers"):
        matmul(matrix(4, 32).to(dtype), matrix(16, 32), recipe=RECIPE)
