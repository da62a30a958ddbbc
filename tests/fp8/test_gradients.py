"""Products and both gradients against float64, whatever the size of the gradients.

Two bounds. *Typical*: an operand of normal values errs by at most 0.03 in float8, 2^-7/sqrt(12) in
bfloat16 (uniform errors of half a unit in the last place), relative, in the Frobenius norm; errors
of several roundings are independent, so their squares add up. *Strict*, for any values: an element
errs by 2^-4 of itself, or 2^-10 of its tile's scale where the code is subnormal.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fp8_parts.training import FlooredQuantizer
from primeblocks.fp8 import Recipe, Tile, grouped_matmul, matmul

SIZES = [1e-2, 1e-3, 1e-5, 1e-7, 1e-9, 1e-20, 1e-30]
FLOAT8, BFLOAT16 = 0.03, 2**-7 / 12**0.5
OFFSETS = [70, 70, 120, 200]  # Ragged, one empty, ends inside tiles; 6 rows belong to nobody.


def recipes():
    smaller = {"activations": Tile(1, 32), "weights": Tile(32, 32)}
    for wgrad, saved in product(["bfloat16", "float32", "float8"], ["input", "float8"]):
        how = {"wgrad": wgrad, "saved": saved}
        yield Recipe(**how)
        yield Recipe(**how, scale="ue8m0")
        yield Recipe.mxfp8(**how)
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


def strict(x, tile, recipe):
    """How far from `|x|` any element may lie after a rounding to float8."""
    side = tile.rows, tile.columns
    amax = F.max_pool2d(x.abs()[None, None], side, ceil_mode=True)[0, 0]
    scales = amax / 448 * (2 if recipe.scale == "ue8m0" else 1)
    spread = scales.repeat_interleave(side[0], 0).repeat_interleave(side[1], 1)
    by_scale = spread[: x.shape[0], : x.shape[1]] * 2**-10
    # Scales, and what is multiplied by their reciprocals, are rounded to float32 first.
    return torch.maximum(x.abs() * 2**-4, by_scale) * (1 + 2**-20)


def bounds_of_sums(a, off_a, b, off_b):
    """The most that `a @ b.T` is off if each element is off by that much, and sums are float32."""
    size = a.abs() @ b.abs().t()
    most = (a.abs() + off_a) @ (b.abs() + off_b).t()
    return most - size + most * (a.shape[1] + 2) * 2**-24


@st.composite
def groups(draw):
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    inside, outside = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    beyond = draw(st.integers(0, 3))
    return torch.tensor(counts).cumsum(0).tolist(), beyond, inside, outside


@settings(max_examples=40)
@given(
    group=groups(),
    recipe=st.sampled_from([r for r in RECIPES if r.weights.columns == 32]),
    size=st.sampled_from(SIZES),
    heavy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_no_element_is_off_by_more_than_its_operands_may_be(group, recipe, size, heavy, seed):
    offsets, beyond, inside, outside = group
    rows = offsets[-1] + beyond
    x, dy = normal(rows, inside, seed=seed), normal(rows, outside, seed=seed + 1)
    if heavy:  # Values of one tile that span many powers of two.
        x, dy = x.pow(3), dy.pow(5)
    dy = dy * size
    weight = normal(len(offsets), outside, inside, seed=seed + 2).bfloat16().float()
    x, weight = leaves(x, weight)
    y = grouped_matmul(x, weight, torch.tensor(offsets), recipe=recipe)
    actual = y, *torch.autograd.grad(y, (x, weight), dy)
    x, weight, dy = x.detach().double(), weight.detach().double(), dy.double()
    exact = exact_groups(x, weight, dy, offsets)
    off_x, off_dy = strict(x, recipe.activations, recipe), strict(dy, recipe.gradients, recipe)
    by_wgrad = [of_wgrad(x, off_x, recipe), of_wgrad(dy, None, recipe)]
    for expert, part in enumerate(parts(offsets)):
        matrix, transposed = weight[expert], weight[expert].t()
        off_matrix = strict(matrix, recipe.weights, recipe)
        off_transposed = strict(transposed, recipe.transposed_weights, recipe)
        bounds = (
            bounds_of_sums(x[part], off_x[part], matrix, off_matrix),
            bounds_of_sums(dy[part], off_dy[part], transposed, off_transposed),
            bounds_of_sums(dy[part].t(), by_wgrad[1][part].t(), x[part].t(), by_wgrad[0][part].t()),
        )
        places = part, part, expert
        for value, true, place, bound in zip(actual, exact, places, bounds, strict=True):
            # Below the smallest normal float32 there is nothing to be relative to.
            assert ((value[place] - true[place]).abs() <= bound + 2**-126).all()


def of_wgrad(x, off_saved, recipe):
    """How far an operand of a weight's gradient may be off; of `dy`, nothing is saved."""
    if recipe.wgrad == "float8":
        return strict(x.t(), recipe.activations, recipe).t()
    saved = off_saved if off_saved is not None and recipe.saved == "float8" else 0 * x
    half = 2**-8 if recipe.wgrad == "bfloat16" else 0
    return saved + (x.abs() + saved) * half
