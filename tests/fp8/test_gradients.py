"""Products and both gradients against float64, whatever the size of the gradients.

An operand of normal values errs by at most 0.03 in float8, 2^-7/sqrt(12) in bfloat16 (uniform
errors of half a unit in the last place), relative, in the Frobenius norm; errors of several
roundings are independent, so their squares add up.
"""

from itertools import product

import pytest
import torch

from benchmarks.fp8_parts.training import FlooredQuantizer
from primeblocks.fp8 import Recipe, Tile, grouped_matmul, matmul

SIZES = [1e-2, 1e-3, 1e-5, 1e-7, 1e-9, 1e-20, 1e-30]
FLOAT8, BFLOAT16 = 0.03, 2**-7 / 12**0.5
OFFSETS = [70, 70, 120, 200]  # Ragged, one empty, ends inside tiles; 6 rows belong to nobody.


def recipes():
    smaller = {"activations": Tile(1, 32), "weights": Tile(32, 32)}
    for wgrad, saved in product(["bfloat16", "float32", "float8"], ["input", "float8"]):
        yield Recipe(wgrad=wgrad, saved=saved)
    yield Recipe(wgrad="float8", scale="ue8m0")
    for wgrad in ("bfloat16", "float8"):
        yield Recipe.mxfp8(wgrad=wgrad, saved="float8")
    yield Recipe(**smaller, quotient="division")
    yield Recipe(**smaller, quotient="amax", wgrad="float8")


RECIPES = list(recipes())
ids = [
    f"{r.weights.rows}x{r.weights.columns}-{r.scale}-{r.quotient}-{r.wgrad}-{r.saved}"
    for r in RECIPES
]


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(actual, exact):
    return float((actual.double() - exact).detach().norm() / exact.detach().norm())


def typical(recipe):
    """Bounds of (y, dx, dw); the weights of these tests are bfloat16 values already."""
    of_products = (2 * FLOAT8**2) ** 0.5
    of_wgrad = {"bfloat16": BFLOAT16, "float32": 0.0, "float8": FLOAT8}[recipe.wgrad]
    of_saved = FLOAT8 if recipe.saved == "float8" and recipe.wgrad != "float8" else 0.0
    # Sums of float32 err by less than 1e-6 of the result at these lengths.
    return of_products, of_products, (2 * of_wgrad**2 + of_saved**2) ** 0.5 + 1e-6


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def parts(offsets):
    return [slice(*ends) for ends in zip([0, *offsets[:-1]], offsets, strict=True)]


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_a_linear_layer_is_within_the_bound_at_any_gradient(recipe):
    x, weight = leaves(normal(144, 160, seed=0), normal(136, 160, seed=1).bfloat16().float())
    y, bounds = matmul(x, weight, recipe=recipe), typical(recipe)
    assert relative(y, x.double() @ weight.double().t()) < bounds[0]
    for size in SIZES:
        dy = normal(144, 136, seed=2) * size
        dx, dw = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        assert relative(dx, dy.double() @ weight.double()) < bounds[1], size
        assert relative(dw, dy.double().t() @ x.double()) < bounds[2], size


@pytest.mark.parametrize("recipe", RECIPES, ids=ids)
def test_experts_are_within_the_bound_at_any_gradient(recipe):
    x, weight = leaves(normal(206, 136, seed=0), normal(4, 64, 136, seed=1).bfloat16().float())
    y = grouped_matmul(x, weight, torch.tensor(OFFSETS), recipe=recipe)
    for size in SIZES:
        dy = normal(206, 64, seed=2) * size
        actual = y, *torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        exact = exact_groups(x.double(), weight.double(), dy.double(), OFFSETS)
        for value, true, bound in zip(actual, exact, typical(recipe), strict=True):
            assert relative(value, true) < bound, size
        assert (actual[2][1] == 0).all()
        assert (actual[1][OFFSETS[-1] :] == 0).all()


@pytest.mark.parametrize("of", ["scale", "amax"])
def test_a_floor_is_out_of_the_bound(of):
    recipe = Recipe(wgrad="float8", quantizer=FlooredQuantizer(of=of))
    x, weight = leaves(normal(144, 160, seed=0), normal(136, 160, seed=1).bfloat16().float())
    y = matmul(x, weight, recipe=recipe)
    errors = {}
    for size in SIZES:
        dy = normal(144, 136, seed=2) * size
        dx, dw = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        errors[size] = relative(dx, dy.double() @ weight.double())
        assert abs(relative(dw, dy.double().t() @ x.double()) - errors[size]) < 0.05
    assert errors[1e-2] < typical(recipe)[1]  # Equal to the definition above the floor.
    # A scale of 1e-4 makes zero of what lies below 1e-4 * 2^-10 = 1e-7; one of 1e-4 / 448, of what
    # lies below 2.2e-10: of gradients of 1e-9 the least.
    assert errors[1e-9] == 1 if of == "scale" else 2 * FLOAT8 < errors[1e-9] < 1
    assert errors[1e-20] == 1


def exact_groups(x, weight, dy, offsets):
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(weight)
    for expert, rows in enumerate(parts(offsets)):
        y[rows], dx[rows] = x[rows] @ weight[expert].t(), dy[rows] @ weight[expert]
        dw[expert] = dy[rows].t() @ x[rows]
    return y, dx, dw
