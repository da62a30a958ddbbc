"""Products and gradients against exact fractions and the dequantized product in float64."""

from fractions import Fraction
from math import frexp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError, ShapeError, UnsupportedError
from primeblocks.fp8 import (
    Recipe,
    ReferenceGemm,
    Tile,
    exact_product,
    grouped_matmul,
    grouped_mm_fn,
    matmul,
    quantize,
)

RECIPE = Recipe(activations=Tile(1, 16), weights=Tile(8, 16))


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 50))
def test_the_reference_engine_is_the_exact_product_to_float32(m, n, k):
    a = quantize(matrix(m, k), RECIPE.activations)
    b = quantize(matrix(n, k, seed=1), RECIPE.weights)
    bound = 1e-6 * exact_product(
        quantize(matrix(m, k).abs(), RECIPE.activations),
        quantize(matrix(n, k, seed=1).abs(), RECIPE.weights),
    )
    assert ((ReferenceGemm()(a, b).double() - exact_product(a, b)).abs() <= bound).all()


def test_the_reference_engine_does_not_depend_on_the_order_within_a_tile():
    a = quantize(matrix(9, 32), RECIPE.activations)
    b = quantize(matrix(7, 32, seed=1), RECIPE.weights)
    order = torch.cat([torch.randperm(16), 16 + torch.randperm(16)])

    def permuted(x):
        codes = x.codes.view(torch.uint8)[:, order].view(torch.float8_e4m3fn)
        return type(x)(codes, x.scales, x.tile)

    assert torch.equal(ReferenceGemm()(a, b), ReferenceGemm()(permuted(a), permuted(b)))


@pytest.mark.parametrize("wgrad", ["float32", "bfloat16"])
def test_gradients_use_the_same_codes(wgrad):
    recipe = Recipe(activations=Tile(1, 16), weights=Tile(8, 16), wgrad=wgrad)
    x = matrix(2, 5, 40).requires_grad_()
    weight = matrix(24, 40, seed=1).requires_grad_()
    dy = matrix(2, 5, 24, seed=2)
    y = matmul(x, weight, recipe=recipe)
    y.backward(dy)
    xq, wq = (
        quantize(x.detach().flatten(0, 1), recipe.activations),
        quantize(weight, recipe.weights),
    )
    dyq = quantize(dy.flatten(0, 1), recipe.gradients)
    assert y.shape == (2, 5, 24)
    assert relative(y.flatten(0, 1), exact_product(xq, wq)) < 1e-6
    assert relative(x.grad.flatten(0, 1), exact_product(dyq, wq.transposed)) < 1e-6
    exact_dw = dy.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
    assert relative(weight.grad, exact_dw) < (1e-6 if wgrad == "float32" else 1e-2)


def test_tiny_gradients_survive():
    x, weight = matrix(8, 32).requires_grad_(), matrix(16, 32, seed=1).requires_grad_()
    dy = matrix(8, 16, seed=2) * 1e-9
    matmul(x, weight, recipe=RECIPE).backward(dy)
    exact = dy.double() @ weight.detach().double()
    assert relative(x.grad, exact) < 0.06


def test_groups_are_products_of_their_own():
    x = matrix(10, 32).requires_grad_()
    experts = matrix(4, 16, 32, seed=1).requires_grad_()
    offsets = torch.tensor([3, 3, 9, 10], dtype=torch.int32)
    y = grouped_mm_fn(RECIPE)(x, experts, offsets)
    parts = [
        matmul(x[a:b], experts[e], recipe=RECIPE)
        for e, (a, b) in enumerate([(0, 3), (3, 3), (3, 9), (9, 10)])
    ]
    assert torch.equal(y, torch.cat(parts))
    dy = matrix(10, 16, seed=2)
    expected = torch.autograd.grad(torch.cat(parts), (x, experts), dy)
    actual = torch.autograd.grad(y, (x, experts), dy)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    dx, dw = actual
    dense = torch.zeros(4, 16, 32, dtype=torch.float64)
    for e, (a, b) in enumerate([(0, 3), (3, 3), (3, 9), (9, 10)]):
        dense[e] = dy[a:b].double().t() @ x[a:b].detach().double()
        if b > a:
            codes = quantize(experts[e], RECIPE.weights).transposed
            dyq = quantize(dy[a:b], RECIPE.gradients)
            assert relative(dx[a:b], exact_product(dyq, codes)) < 1e-6
    assert relative(dw, dense) < 1e-6
    assert (dw[1] == 0).all()


@pytest.mark.parametrize("offsets", [[3, 2, 9, 10], [3, 3, 9, 9], [3, 3, 10]])
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
    assert Recipe().fingerprint() == Recipe(wgrad="bfloat16").fingerprint()
    assert Recipe().fingerprint() != RECIPE.fingerprint()
    with pytest.raises(PlanError, match="columns"):
        Recipe(activations=Tile(1, 64))
    with pytest.raises(UnsupportedError, match="ue8m0"):
        Recipe(scale="ue8m0")
    with pytest.raises(UnsupportedError, match="float8"):
        Recipe(wgrad="float8")
