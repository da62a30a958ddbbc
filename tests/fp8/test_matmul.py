"""Products and gradients against exact fractions and the dequantized product in float64."""

import dataclasses
import itertools
from fractions import Fraction
from math import frexp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError, ShapeError, UnsupportedError, UsageError
from primeblocks.fp8 import (
    Recipe,
    Tile,
    grouped_matmul,
    matmul,
    quantize,
)
from primeblocks.fp8.reference import ReferenceGemm, SimulatedGemm

SMALL = {"activations": Tile(1, 16), "weights": Tile(8, 16), "source": "float32"}
RECIPE = Recipe(**SMALL, wgrad="float32")


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact_product(a, b):
    """The product of two quantized matrices in float64, which kernels approximate."""
    return a.dequantize(torch.float64) @ b.dequantize(torch.float64).mT


def relative(actual, expected):
    return float((actual.detach().double() - expected).norm() / expected.norm())


def to_float32(exact):
    """Round a fraction to the nearest float32, ties to even, in integers alone."""
    if exact == 0:
        return Fraction(0)
    # A float64 quotient may round up to the next power of two; one bit more does no harm then.
    exponent = frexp(abs(float(exact)))[1]
    if abs(exact) < Fraction(2) ** (exponent - 1):
        exponent -= 1
    step = Fraction(2) ** max(exponent - 24, -149)
    return round(exact / step) * step


def naive_product(a, b):
    """The definition of `ReferenceGemm` in plain loops over fractions."""
    size = a.tile.columns
    codes_a, codes_b = (
        [[Fraction(v) for v in row] for row in x.codes.float().tolist()] for x in (a, b)
    )
    out = torch.zeros(len(codes_a), len(codes_b))
    for m, row in enumerate(codes_a):
        for n, column in enumerate(codes_b):
            total = Fraction(0)
            for k in range(a.scales.shape[1]):
                part = slice(k * size, (k + 1) * size)
                partial = sum(x * y for x, y in zip(row[part], column[part], strict=True))
                scale_a = Fraction(float(a.scales[m // a.tile.rows, k]))
                scale_b = Fraction(float(b.scales[n // b.tile.rows, k]))
                scale = to_float32(scale_a * scale_b)
                total = to_float32(scale * to_float32(partial) + total)
            out[m, n] = float(total)
    return out


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e-20])
@given(m=st.integers(1, 5), n=st.integers(1, 11), k=st.integers(1, 50), seed=st.integers(0, 999))
def test_the_reference_engine_is_its_definition_to_the_bit(scale, m, n, k, seed):
    a = quantize(matrix(m, k, seed=seed) * scale, RECIPE.activations)
    b = quantize(matrix(n, k, seed=seed + 1) * scale, RECIPE.weights)
    assert torch.equal(ReferenceGemm()(a, b), naive_product(a, b))


OFFSETS = torch.tensor([3, 3, 9, 10], dtype=torch.int32)
RUNS = [slice(0, 3), slice(3, 3), slice(3, 9), slice(9, 10)]
KINDS = [
    {"wgrad": "float32"},
    {"wgrad": "bfloat16"},
    {"wgrad": "bfloat16", "saved": "float8"},
    {"wgrad": "float8"},
    {"wgrad": "float8", "saved": "float8"},
    {"wgrad": "float8", "scale": "ue8m0", "quotient": "division"},
]


def rounded(x, recipe, *, stored):
    """An operand of the weight's gradient as the recipe rounds it, in float64."""
    if recipe.wgrad == "float8":
        return recipe.quantize(x.mT, recipe.activations).dequantize(torch.float64).mT
    if stored and recipe.saved == "float8":
        x = recipe.quantize(x, recipe.activations).dequantize()
    return x.to(getattr(torch, recipe.wgrad)).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiles", [RECIPE, Recipe.mxfp8(source="float32")])
def test_gradients_are_products_of_what_was_rounded(kind, tiles):
    recipe = dataclasses.replace(tiles, **kind)
    x, weight = matrix(2, 5, 40).requires_grad_(), matrix(24, 40, seed=1).requires_grad_()
    dy = matrix(2, 5, 24, seed=2)
    y = matmul(x, weight, recipe=recipe)
    y.backward(dy)
    rows, dy = x.detach().flatten(0, 1), dy.flatten(0, 1)
    wq = recipe.quantize_weight(weight)
    assert y.shape == (2, 5, 24)
    exact = exact_product(recipe.quantize(rows, recipe.activations), wq)
    assert relative(y.flatten(0, 1), exact) < 1e-6
    if recipe.weights.rows == 1:
        across = recipe.quantize_weight(weight.detach().mT)
    else:
        across = wq.transposed
    exact = exact_product(recipe.quantize(dy, recipe.gradients), across)
    assert relative(x.grad.flatten(0, 1), exact) < 1e-6
    exact = rounded(dy, recipe, stored=False).mT @ rounded(rows, recipe, stored=True)
    assert relative(weight.grad, exact) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_products_of_their_own(kind):
    recipe = Recipe(**{**SMALL, **kind})
    x, experts = matrix(12, 32).requires_grad_(), matrix(4, 16, 32, seed=1).requires_grad_()
    y = grouped_matmul(x, experts, OFFSETS, recipe=recipe)
    parts = [matmul(x[rows], w, recipe=recipe) for rows, w in zip(RUNS, experts, strict=True)]
    assert torch.equal(y[:10], torch.cat(parts))
    assert (y[10:] == 0).all()
    dy = matrix(12, 16, seed=2)
    dx, dw = torch.autograd.grad(y, (x, experts), dy)
    (of_parts,) = torch.autograd.grad(torch.cat(parts), x, dy[:10])
    assert torch.equal(dx, of_parts)
    # Tiles along the tokens lie where they lie, whoever's tokens they hold.
    owned = (torch.arange(12) < 10)[:, None]  # Rows past the last offset count for nothing.
    a = rounded(dy * owned, recipe, stored=False)
    b = rounded(x.detach() * owned, recipe, stored=True)
    exact = torch.stack([a[rows].mT @ b[rows] for rows in RUNS])
    assert relative(dw, exact) < 1e-6
    assert (dw[1] == 0).all()


def test_what_forward_keeps_of_its_input_is_as_the_recipe_says():
    x, weight = matrix(64, 256).requires_grad_(), matrix(128, 256, seed=1).requires_grad_()
    kept = {}
    for saved, wgrad in itertools.product(("input", "float8"), ("bfloat16", "float8")):
        sizes = []

        def size(tensor, sizes=sizes):
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(size, lambda tensor: tensor):
            matmul(x, weight, recipe=Recipe(saved=saved, wgrad=wgrad))
        kept[saved, wgrad] = sum(sizes) - weight.numel() - 2 * 4
    rows, columns = 64 * 256 + 64 * 2 * 4, 256 * 64 + 256 * 1 * 4  # a code a value, scales
    assert kept == {
        ("input", "bfloat16"): x.nbytes,
        ("input", "float8"): x.nbytes,
        ("float8", "bfloat16"): rows,
        ("float8", "float8"): columns,
    }


def test_a_frozen_weight_keeps_no_input():
    x, weight = matrix(8, 32).requires_grad_(), matrix(16, 32, seed=1)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(shapes.append, lambda _: None):
        matmul(x, weight, recipe=RECIPE)
    assert [tensor.shape for tensor in shapes] == [(32, 16), (2, 2)]


def test_experts_of_one_batch_share_no_tile():
    experts = matrix(3, 20, 50) * torch.tensor([1e-6, 1.0, 1e6]).reshape(3, 1, 1)
    whole = RECIPE.quantize_weight(experts)
    for expert, alone in enumerate(map(RECIPE.quantize_weight, experts)):
        assert torch.equal(whole.codes[expert].float(), alone.codes.float())
        assert torch.equal(whole.scales[expert], alone.scales)


def test_the_source_of_a_weight_is_kept_or_refused():
    weight = matrix(16, 32)
    export, master = Recipe(), Recipe(source="float32")
    same = [export.quantize_weight(w).dequantize() for w in (weight, weight.bfloat16())]
    assert torch.equal(*same)
    assert not torch.equal(same[0], master.quantize_weight(weight).dequantize())
    with pytest.raises(UsageError, match="quantizes master weights; got one in torch.bfloat16"):
        matmul(weight, weight.bfloat16(), recipe=master)


@pytest.mark.parametrize("engine", [ReferenceGemm(), SimulatedGemm()])
def test_an_expert_without_tokens_meets_no_nan_of_its_neighbours(engine):
    recipe = Recipe(**SMALL, wgrad="float8", gemm=engine)
    x, experts = matrix(12, 32), matrix(4, 16, 32, seed=1).requires_grad_()
    x[5, 3] = torch.nan
    y = grouped_matmul(x, experts, OFFSETS, recipe=recipe)
    (dw,) = torch.autograd.grad(y, experts, torch.ones_like(y))
    assert (dw[1] == 0).all()
    assert dw[2].isnan().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_pass_as_nan_or_are_refused(bad):
    x, weight = matrix(4, 32), matrix(16, 32, seed=1)
    x[2, 5] = bad
    y = matmul(x, weight, recipe=RECIPE)
    assert y[2].isnan().all()
    clean = matmul(x[[0, 1, 3]], weight, recipe=RECIPE)
    assert torch.equal(y[[0, 1, 3]], clean)
    with pytest.raises(UsageError, match="1 of 128"):
        matmul(x, weight, recipe=Recipe(**SMALL, nonfinite="raise"))


def test_a_gradient_that_is_expanded_is_taken():
    x, weight = matrix(8, 32).requires_grad_(), matrix(16, 32, seed=1).requires_grad_()
    for recipe in (RECIPE, Recipe(**SMALL, wgrad="float8")):
        found = torch.autograd.grad(matmul(x, weight, recipe=recipe).sum(), (x, weight))
        expected = torch.autograd.grad(
            matmul(x, weight, recipe=recipe), (x, weight), torch.ones(8, 16)
        )
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("offsets", [[3, 2, 9, 10], [-1, 3, 9, 10], [3, 3, 9, 11], [3, 3, 10]])
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(ShapeError, match="offsets"):
        grouped_matmul(matrix(10, 32), matrix(4, 16, 32), torch.tensor(offsets), recipe=RECIPE)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"\[3, 4\]"):
        matmul(matrix(3, 4), matrix(3, 5), recipe=RECIPE)
    with pytest.raises(ShapeError, match="inner"):
        ReferenceGemm()(quantize(matrix(2, 4), Tile(1, 2)), quantize(matrix(2, 4), Tile(1, 4)))


def test_a_recipe_is_a_value():
    assert Recipe() == Recipe()
    assert hash(Recipe()) == hash(Recipe())
    with pytest.raises(PlanError, match="columns"):
        Recipe(activations=Tile(1, 64))
    with pytest.raises(UnsupportedError, match="tiles of one row"):
        Recipe(activations=Tile(2, 128), wgrad="float8")


def test_a_fingerprint_is_of_all_that_decides_codes_and_of_nothing_else():
    alike = [
        Recipe(),
        Recipe(wgrad="float8"),
        Recipe(saved="float8"),
        Recipe(nonfinite="raise"),
        Recipe(gemm=SimulatedGemm()),
    ]
    assert len({recipe.fingerprint() for recipe in alike}) == 1
    others = [
        Recipe(),
        RECIPE,
        Recipe(source="float32"),
        Recipe(scale="ue8m0"),
        Recipe(quotient="division"),
        Recipe(weights=Tile(64, 128)),
        Recipe.mxfp8(),
    ]
    prints = [
        recipe.fingerprint(layers) for recipe in others for layers in ((), ("a",), ("a", "b"))
    ]
    assert len(set(prints)) == len(prints)
    assert Recipe().fingerprint(["b", "a"]) == Recipe().fingerprint(("a", "b", "a"))
    assert Recipe().fingerprint() == "8481b4d195e5e13a"  # the same in every process and release
    with pytest.raises(UsageError, match="layers must be names"):
        Recipe().fingerprint("a")
