"""Kernels of `exact` one by one: the same bits in any batch, and right against float64."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from primeblocks.errors import ShapeError, UnsupportedError
from primeblocks.exact import batch_invariant

triton = pytest.importorskip("triton", reason="triton is not installed; scripts/peers does")
INTERPRETED = triton.knobs.runtime.interpret
if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from primeblocks.exact.adapters import triton as exact  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPS, UNIT = 1e-6, 2.0**-24  # A result in float32 is off by a unit at most, relative to itself.


def drawn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounding(dtype, values):
    """The largest error of a result that is rounded to a dtype, also if it is subnormal there."""
    info = torch.finfo(dtype)
    return values.abs() * info.eps / 2 + info.smallest_normal * info.eps


def assert_within(found, wanted, limit):
    assert ((found.double() - wanted).abs() <= limit).all()


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
    """Let the interpreter multiply tiles in the order of `k`.

    NumPy's `matmul`, which it uses, gives a row of a tile other bits at another place.
    """
    interpreter = triton.runtime.interpreter

    def multiply(self, a, b, total, *_):
        found = np.zeros_like(total.data)
        for column, row in zip(a.data.T, b.data, strict=True):
            found += column[:, None] * row
        return interpreter.TensorHandle(found + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply)


@pytest.mark.parametrize("shape", [(150, 200, 140), (129, 17, 129), (5, 33, 7), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_has_rows_of_its_own(dtype, transposed, shape):
    dtype, (count, inner, outer) = DTYPES[dtype], shape
    left = drawn(count, inner, seed=1, dtype=dtype)
    right = drawn(outer, inner, seed=2, dtype=dtype).t()
    right = right if transposed else right.contiguous()
    whole = assert_rows_of_their_own(lambda x: exact.matmul(x, right), left, seed=45)
    assert whole.dtype == dtype
    # Each product and each sum is off by a unit of what is added.
    wanted, added = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert_within(whole, wanted, 2 * inner * UNIT * added + rounding(dtype, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_and_groups_have_the_bits_of_single_products(dtype):
    left, right = (drawn(*shape, seed=1, dtype=DTYPES[dtype]) for shape in [(300, 70), (6, 70, 90)])
    ends = torch.tensor([0, 3, 3, 200, 201, 280], dtype=torch.int32)
    found = exact.grouped_matmul(left, right, ends)
    for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        alone = exact.matmul(left[start:end], right[group])
        assert torch.equal(found[start:end], alone)
    assert not found[280:].any()
    late = exact.grouped_matmul(left[:250], right, ends)
    assert torch.equal(late, found[:250])
    batch = exact.matmul(left.view(6, 50, 70).transpose(0, 1).contiguous().transpose(0, 1), right)
    for group in range(6):
        alone = exact.matmul(left.view(6, 50, 70)[group], right[group])
        assert torch.equal(batch[group], alone)
    assert exact.matmul(left[:0], right[0]).shape == (0, 90)
    assert exact.matmul(left[:, :0], right[0, :0]).eq(0).all()


FUNCTIONS = {
    "total": (exact.total, lambda x, w: x.sum(-1)),
    "mean": (exact.mean, lambda x, w: x.mean(-1)),
    "softmax": (exact.softmax, lambda x, w: x.softmax(-1)),
    "log_softmax": (exact.log_softmax, lambda x, w: x.log_softmax(-1)),
    "rms_norm": (exact.rms_norm, lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, EPS)),
}


def limit(name, x, weight, wanted):
    """The largest error of a computation in float32 that adds in a tree."""
    depth = math.ceil(math.log2(max(x.shape[1], 2)))
    size = x.abs().sum(-1)
    if name in ("total", "mean"):
        return (depth + 1) * UNIT * (size if name == "total" else size / x.shape[1])
    if name == "rms_norm":  # A root halves the error of its operand.
        return ((depth + 3) / 2 + 4) * UNIT * wanted.abs()
    # NumPy's exponential is off by three units of its last place, of 2 UNIT each, and the
    # subtraction of the maximum moves it by a unit of the difference.
    left = x.amax(-1, keepdim=True) - x
    each = (left + 6) * UNIT
    whole = depth * UNIT + (x.softmax(-1) * each).sum(-1, keepdim=True)
    if name == "softmax":
        return wanted * (each + whole + UNIT)
    logarithm = x.logsumexp(-1, keepdim=True) - x.amax(-1, keepdim=True)
    return left * UNIT + whole + 8 * UNIT * logarithm + UNIT * wanted.abs()


@pytest.mark.parametrize("width", [1, 3, 301, 1024, 2500])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_is_computed_alone(name, dtype, width):
    dtype = DTYPES[dtype]
    values, weight = drawn(9, width, seed=2, dtype=dtype) * 8, drawn(width, seed=3, dtype=dtype)
    function, plain = FUNCTIONS[name]
    more = (weight,) if name == "rms_norm" else ()
    how = {"eps": EPS} if more else {}
    whole = assert_rows_of_their_own(lambda x: function(x, *more, **how), values, seed=7)
    assert torch.equal(function(values.view(3, 3, -1), *more, **how).flatten(0, 1), whole)
    wanted = plain(values.double(), weight.double())
    most = 1.01 * limit(name, values.double(), weight.double(), wanted)
    assert_within(whole, wanted, most + rounding(dtype, wanted))
    if not more:
        wide = function(values, dtype=torch.float32)
        assert torch.equal(wide.to(dtype), whole)
        assert_within(wide, wanted, most + rounding(torch.float32, wanted))
    if not name.endswith("softmax"):  # Their exponentials differ from torch's.
        with batch_invariant():
            assert torch.equal(plain(values, weight), whole)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # Of NumPy, about NaN.
def test_rows_with_infinities_nans_and_nothing():
    rows = torch.tensor([[1.0, 2.0, 3.0], [1.0, -torch.inf, 0.0], [1.0, torch.nan, 2.0]])
    rows = torch.cat([rows, torch.full((1, 3), -torch.inf), torch.full((1, 3), torch.inf)])
    for name, (function, plain) in FUNCTIONS.items():
        if name != "rms_norm":
            torch.testing.assert_close(function(rows), plain(rows, None), equal_nan=True)
    wide = torch.nn.functional.pad(rows[:2], (0, 2000), value=-torch.inf)
    assert torch.equal(exact.softmax(wide)[:, :3], exact.softmax(rows[:2]))
    assert exact.total(rows[:, :0]).tolist() == [0] * 5
    assert exact.mean(rows[:, :0]).isnan().all()
    assert exact.softmax(rows[:0]).shape == (0, 3)
    assert exact.softmax(rows[:, :0]).shape == (5, 0)


def test_what_the_kernels_cannot_compute_is_refused():
    x, matrices = torch.ones(4, 6), torch.ones(2, 6, 5)
    ends = torch.tensor([1, 4])
    for odd, word in [
        (lambda: exact.matmul(x, x), r"got \[4, 6\] of torch.float32 on cpu, \[1, 4, 6\]"),
        (lambda: exact.matmul(matrices.mT, matrices[:1]), r"\[1, 6, 5\]"),
        (lambda: exact.matmul(matrices, x), r"got \[12, 5\] .*, \[4, 6\]"),
        (lambda: exact.matmul(x[0], x), "do not multiply"),
        (lambda: exact.matmul(x, matrices[0].bfloat16()), "bfloat16"),
        (lambda: exact.grouped_matmul(x, matrices, ends[:1]), r"and \[1\] on cpu"),
        (lambda: exact.grouped_matmul(x, matrices[0], ends), r"and \[2\]"),
        (lambda: exact.rms_norm(x, x[0, :5], eps=EPS), r"weight of shape \[5\]"),
        (lambda: exact.total(x.sum()), "at least one dim"),
    ]:
        with pytest.raises(ShapeError, match=word):
            odd()
    learned = x.clone().requires_grad_()
    for odd, word in [
        (lambda: exact.softmax(x.double()), "float64"),
        (lambda: exact.matmul(learned, matrices[0]), "requires_grad=True"),
        (lambda: exact.rms_norm(x, learned[0], eps=EPS), "no_grad"),
    ]:
        with pytest.raises(UnsupportedError, match=word):
            odd()
    with torch.no_grad():
        assert exact.mean(learned).tolist() == [1] * 4
