"""Kernels of `exact` one by one: the same bits in any batch, and right against float64."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from primeblocks.errors import ShapeError, UnsupportedError
from primeblocks.exact import batch_invariant
from tests.exact.triton_cases import (
    DEVICE,
    DTYPES,
    MARKS,
    UNIT,
    assert_within,
    drawn,
    kernels,
    multiply_tiles_in_order,
    rounding,
)

pytestmark = MARKS


def assert_rows_of_their_own(function, values, seed):
    """Rows have the bits of `function(values)` in any order, in two parts, and next to others."""
    whole = function(values)
    generator = np.random.default_rng(seed)
    order = torch.from_numpy(generator.permutation(len(values)))
    assert torch.equal(function(values[order]), whole[order])
    cut = seed % len(values)
    assert torch.equal(torch.cat([function(values[:cut]), function(values[cut:])]), whole)
    others = drawn(seed % 150 + 1, *values.shape[1:], seed=seed).to(values.dtype) * 100
    assert torch.equal(function(torch.cat([others, values]))[len(others) :], whole)
    zeros = torch.zeros_like(others)
    assert torch.equal(function(torch.cat([values, zeros]))[: len(values)], whole)
    return whole


@pytest.fixture(autouse=True)
def _tiles_are_multiplied_in_order(monkeypatch):
    multiply_tiles_in_order(monkeypatch)
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("shape", [(150, 200, 140), (129, 17, 129), (5, 33, 7), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_has_rows_of_its_own(dtype, transposed, shape):
    dtype, (count, inner, outer) = DTYPES[dtype], shape
    left = drawn(count, inner, seed=1, dtype=dtype)
    right = drawn(outer, inner, seed=2, dtype=dtype).t()
    right = right if transposed else right.contiguous()
    whole = assert_rows_of_their_own(lambda x: kernels.matmul(x, right), left, seed=45)
    assert whole.dtype == dtype
    # Each product and each sum is off by a unit of what is added.
    wanted, added = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert_within(whole, wanted, 2 * inner * UNIT * added + rounding(dtype, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_and_groups_have_the_bits_of_single_products(dtype):
    left, right = (drawn(*shape, seed=1, dtype=DTYPES[dtype]) for shape in [(300, 70), (6, 70, 90)])
    ends = torch.tensor([0, 3, 3, 200, 201, 280], dtype=torch.int32)
    found = kernels.grouped_matmul(left, right, ends)
    for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        alone = kernels.matmul(left[start:end], right[group])
        assert torch.equal(found[start:end], alone)
    assert not found[280:].any()
    late = kernels.grouped_matmul(left[:250], right, ends)
    assert torch.equal(late, found[:250])
    batch = kernels.matmul(left.view(6, 50, 70).transpose(0, 1).contiguous().transpose(0, 1), right)
    for group in range(6):
        alone = kernels.matmul(left.view(6, 50, 70)[group], right[group])
        assert torch.equal(batch[group], alone)
    assert kernels.matmul(left[:0], right[0]).shape == (0, 90)
    assert kernels.matmul(left[:, :0], right[0, :0]).eq(0).all()


FUNCTIONS = {
    "total": (kernels.total, lambda x: x.sum(-1)),
    "softmax": (kernels.softmax, lambda x: x.softmax(-1)),
    "log_softmax": (kernels.log_softmax, lambda x: x.log_softmax(-1)),
}


def limit(name, x, wanted):
    """The largest error of a computation in float32 that adds in a tree."""
    depth = math.ceil(math.log2(max(x.shape[1], 2)))
    if name == "total":
        return (depth + 1) * UNIT * x.abs().sum(-1)
    # An exponential is off by three units of its last place, of 2 UNIT each. The subtraction of
    # the maximum moves it by a unit of the difference, and a GPU's multiplication by two more.
    left = x.amax(-1, keepdim=True) - x
    each = (3 * left + 6) * UNIT
    whole = depth * UNIT + (x.softmax(-1) * each).sum(-1, keepdim=True)
    if name == "softmax":
        return wanted * (each + whole + UNIT)
    logarithm = x.logsumexp(-1, keepdim=True) - x.amax(-1, keepdim=True)
    return left * UNIT + whole + 8 * UNIT * logarithm + 4 * UNIT + UNIT * wanted.abs()


@pytest.mark.parametrize("width", [1, 3, 301, 1024, 2500])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_is_computed_alone(name, dtype, width):
    values = drawn(9, width, seed=2, dtype=DTYPES[dtype]) * 8
    function, plain = FUNCTIONS[name]
    whole = assert_rows_of_their_own(function, values, seed=7)
    assert torch.equal(function(values.view(3, 3, -1)).flatten(0, 1), whole)
    wanted = plain(values.double())
    most = 1.01 * limit(name, values.double(), wanted)
    assert_within(whole, wanted, most + rounding(values.dtype, wanted))
    wide = function(values, dtype=torch.float32)
    assert torch.equal(wide.to(values.dtype), whole)
    assert_within(wide, wanted, most + rounding(torch.float32, wanted))
    if name == "total":  # The exponentials of the others differ from torch's.
        with batch_invariant():
            assert torch.equal(plain(values.cpu()), whole.cpu())


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # Of NumPy, about NaN.
def test_rows_with_infinities_nans_and_nothing():
    rows = torch.tensor([[1.0, 2.0, 3.0], [1.0, -torch.inf, 0.0], [1.0, torch.nan, 2.0]])
    rows = torch.cat([rows, torch.full((1, 3), -torch.inf), torch.full((1, 3), torch.inf)])
    for function, plain in FUNCTIONS.values():
        torch.testing.assert_close(function(rows), plain(rows), equal_nan=True)
    wide = torch.nn.functional.pad(rows[:2], (0, 2000), value=-torch.inf)
    assert torch.equal(kernels.softmax(wide)[:, :3], kernels.softmax(rows[:2]))
    assert kernels.total(rows[:, :0]).tolist() == [0] * 5
    assert kernels.softmax(rows[:0]).shape == (0, 3)
    assert kernels.softmax(rows[:, :0]).shape == (5, 0)


def test_what_the_kernels_cannot_compute_is_refused():
    x, matrices = torch.ones(4, 6), torch.ones(2, 6, 5)
    ends = torch.tensor([1, 4])
    for odd, word in [
        (lambda: kernels.matmul(x, x), r"got \[4, 6\] of torch.float32 on \w+, \[1, 4, 6\]"),
        (lambda: kernels.matmul(matrices.mT, matrices[:1]), r"\[1, 6, 5\]"),
        (lambda: kernels.matmul(matrices, x), r"got \[12, 5\] .*, \[4, 6\]"),
        (lambda: kernels.matmul(x[0], x), "do not multiply"),
        (lambda: kernels.matmul(x, matrices[0].bfloat16()), "bfloat16"),
        (lambda: kernels.grouped_matmul(x, matrices, ends[:1]), r"and \[1\] on"),
        (lambda: kernels.grouped_matmul(x, matrices[0], ends), r"and \[2\]"),
        (lambda: kernels.total(x.sum()), "at least one dim"),
    ]:
        with pytest.raises(ShapeError, match=word):
            odd()
    learned = x.clone().requires_grad_()
    for odd, word in [
        (lambda: kernels.softmax(x.double()), "float64"),
        (lambda: kernels.matmul(learned, matrices[0]), "requires_grad=True"),
        (lambda: kernels.total(learned), "no_grad"),
    ]:
        with pytest.raises(UnsupportedError, match=word):
            odd()
    with torch.no_grad():
        assert kernels.total(learned).tolist() == [6] * 4
