"""Products in Triton against the reference: interpreted, or compiled on a CUDA device."""

import contextlib

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from primeblocks import fp8
from primeblocks.errors import ShapeError, UnsupportedError, UsageError
from primeblocks.fp8 import Quantized, Tile, quantize
from tests.fp8.on_triton import (
    DEVICE,
    GEMM,
    INTERPRETED,
    MARKS,
    MX,
    QUANTIZER,
    REFERENCE,
    ROW,
    SQUARE,
    adapter,
    assert_same,
    matrix,
    on_device,
    triton,
)
from tests.fp8.test_matmul import exact_product

pytestmark = MARKS


def bound(a, b, inner):
    """Elementwise error of float32 sums in any order, and of Hopper's 13 bits on a device."""
    sizes = exact_product(
        Quantized(a.codes.float().abs().to(torch.float8_e4m3fn), a.scales, a.tile),
        Quantized(b.codes.float().abs().to(torch.float8_e4m3fn), b.scales, b.tile),
    )
    tiles = -(-inner // a.tile.columns)
    per_tile = (a.tile.columns + 4) * (2.0**-24 if INTERPRETED else 2.0**-13)
    return sizes * (per_tile + 2 * tiles * 2.0**-24)


def assert_close(found, expected, limit):
    assert ((found.cpu().double() - expected.double()).abs() <= limit).all()


@settings(max_examples=12)
@given(
    st.tuples(st.integers(1, 150), st.integers(1, 300), st.integers(1, 300)),
    st.sampled_from([(ROW, SQUARE), (ROW, ROW), (MX, MX)]),
    st.sampled_from([1e-9, 1.0]),
)
def test_products_are_those_of_the_reference(shape, tiles, scale):
    rows, columns, inner = shape
    a = quantize(matrix(rows, inner, scale=scale), tiles[0])
    b = quantize(matrix(columns, inner, seed=1), tiles[1])
    found = GEMM(on_device(a), on_device(b))
    assert_close(found, REFERENCE(a, b), bound(a, b, inner))
    half = adapter.TritonGemm()(on_device(a), on_device(b))
    assert half.dtype == torch.bfloat16
    assert_close(half, found.cpu(), found.cpu().double().abs() / 128)  # The interpreter cuts off.


@pytest.mark.skipif(not INTERPRETED, reason="tensor cores round sums of a tile")
def test_sums_that_are_exact_make_products_equal_to_the_bit():
    def whole(rows, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(-8, 9, (rows, 300), generator=generator).float()
        x[:, ::100] = 448
        return x * torch.rand(rows, 1, generator=generator)

    for tile in (SQUARE, ROW):
        a = quantize(whole(130, 0), ROW)
        b = quantize(whole(270, 1) if tile == ROW else whole(270, 1).round(), tile)
        found, expected = GEMM(a, b), REFERENCE(a, b)
        # fma in the interpreter rounds once since Triton 3.9, twice before.
        apart = (found - expected).abs() / expected.abs().clamp(min=1e-30)
        rounds_once = triton.__version__ >= "3.9"
        assert apart.max() <= (0 if rounds_once else 2.0**-20)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=4), st.integers(0, 40))
def test_groups_of_rows_meet_their_own_weights_and_the_rest_is_zero(sizes, after):
    ends = torch.tensor(sizes).cumsum(0).int()
    rows = int(ends[-1]) + after
    ends = torch.stack([ends, ends + 1], dim=1)[:, 0]  # A column, as of counts by layer.
    a = quantize(matrix(rows, 160), ROW)
    b = quantize(matrix(len(sizes), 140, 160, seed=1), SQUARE)
    found = GEMM.grouped(on_device(a), on_device(b), ends.to(DEVICE)).cpu()
    assert found.shape == (rows, 140)
    for expert, (size, end) in enumerate(zip(sizes, ends.tolist(), strict=True)):
        part = slice(end - size, end)
        of_a = Quantized(a.codes[part], a.scales[part], ROW)
        of_b = Quantized(b.codes[expert], b.scales[expert], SQUARE)
        assert_close(found[part], REFERENCE(of_a, of_b), bound(of_a, of_b, 160))
    assert (found[int(ends[-1]) :] == 0).all()


@settings(max_examples=10)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(0, 40))
def test_groups_of_tokens_share_tiles_and_keep_to_their_own(sizes, after):
    ends = torch.tensor(sizes).cumsum(0).int()
    tokens = max(1, int(ends[-1]) + after)
    a = quantize(matrix(60, tokens), ROW)
    b = quantize(matrix(140, tokens, seed=1), ROW)
    found = GEMM.k_grouped(on_device(a), on_device(b), ends.to(DEVICE))
    assert found.dtype == torch.float32
    expected = REFERENCE.k_grouped(a, b, ends)
    for expert in range(len(sizes)):
        assert_close(found[expert], expected[expert], bound(a, b, tokens))
        assert sizes[expert] or (found[expert] == 0).all()


def test_a_tile_that_is_not_a_number_makes_its_products_so_and_no_others():
    x = matrix(130, 256)
    x[7, 200] = torch.nan
    bad = quantize(x, ROW, nonfinite="nan")
    good = quantize(matrix(40, 256, seed=1), ROW)
    product = GEMM(on_device(bad), on_device(good))
    assert product[7].isnan().all()
    assert product.isnan().sum() == 40
    ends = torch.tensor([100, 200, 200, 256], dtype=torch.int32, device=DEVICE)
    groups = GEMM.k_grouped(on_device(bad), on_device(good), ends)
    # The first has no token of that tile, the third none at all.
    assert groups[:, 7].isnan().all(-1).tolist() == [False, True, False, True]
    assert groups.isnan().sum() == 2 * 40
    assert (groups[2] == 0).all()


def test_codes_along_the_other_dim_are_copied():
    a, b = quantize(matrix(20, 130), ROW), quantize(matrix(130, 50), SQUARE)
    found = GEMM(on_device(a), on_device(b).transposed)
    assert_close(found, REFERENCE(a, b.transposed), bound(a, b.transposed, 130))


def test_a_recipe_with_both_engines_trains_as_the_reference_does():
    gradients = []
    for engines in ({}, {"gemm": GEMM, "quantizer": QUANTIZER}):
        recipe = fp8.Recipe(wgrad="float8", **engines)
        device = DEVICE if engines else "cpu"
        x = matrix(96, 256).to(device).requires_grad_()
        experts = matrix(2, 128, 256, seed=1).to(device).requires_grad_()
        ends = torch.tensor([40, 90], dtype=torch.int32, device=device)
        y = fp8.grouped_matmul(x, experts, ends, recipe=recipe)
        (y * matrix(96, 128, seed=2).to(device)).sum().backward()
        gradients.append([t.detach().cpu() for t in (y, x.grad, experts.grad)])
    tolerance = 1e-5 if INTERPRETED else 1e-2
    for found, expected in zip(*reversed(gradients), strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.skipif(INTERPRETED, reason="large operands are for a device")
@pytest.mark.parametrize("tokens", [4096, 5000])
def test_large_operands(tokens):
    x, dy = (matrix(tokens, width, seed=width).bfloat16() for width in (2048, 1024))
    weight = matrix(8, 1024, 2048).bfloat16()
    of_x, of_xt = QUANTIZER.both(x.to(DEVICE), ROW)
    of_dy, of_dyt = QUANTIZER.both(dy.to(DEVICE), ROW)
    of_w, of_wt = QUANTIZER.both(weight.to(DEVICE), SQUARE)
    pairs = ((of_x, x), (of_xt, x.mT), (of_dy, dy), (of_dyt, dy.mT))
    for found, plain in (*pairs, (of_w, weight), (of_wt, weight.mT)):
        assert_same(found, quantize(plain, found.tile))
    ends = torch.tensor([0, 300, 1024, 1024, 2000, 3000, 3001, 4000], dtype=torch.int32)
    ends = ends.to(DEVICE)
    first = Quantized(of_w.codes[0], of_w.scales[0], SQUARE)
    for call in (
        lambda engine: engine(of_x, first),
        lambda engine: engine.grouped(of_x, of_w, ends),
        lambda engine: engine.grouped(of_dy, of_wt, ends),
        lambda engine: engine.k_grouped(of_dyt, of_xt, ends),
    ):
        found, expected = call(GEMM), call(REFERENCE)
        assert found.shape == expected.shape
        assert (found - expected).norm() <= 1e-3 * expected.norm()  # DeepGEMM's own limit
        assert torch.equal(call(GEMM), found)


class _HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.count += "_local_scalar_dense" in name or "nonzero" in name
        return function(*args, **(kwargs or {}))


class _Launches:
    """A kernel that counts how often it is launched, and the programs."""

    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


@contextlib.contextmanager
def counting(monkeypatch):
    launches = []
    for module, name in (
        (adapter.quantize, "_quantize_blocks"),
        (adapter.gemm, "_multiply_blocks"),
    ):
        counter = _Launches(getattr(module, name))
        launches.append(counter)
        monkeypatch.setattr(module, name, counter)
    with _HostReads() as reads:
        yield lambda: (sum(len(counter.grids) for counter in launches), reads.count)


def test_every_call_is_one_launch_and_no_read_by_the_host(monkeypatch):
    x = matrix(130, 256).to(DEVICE)
    ends = torch.tensor([40, 130], dtype=torch.int32, device=DEVICE)
    a, weight = QUANTIZER(x, ROW), QUANTIZER(matrix(2, 128, 256).to(DEVICE), SQUARE)
    calls = [
        lambda: QUANTIZER.both(x, ROW, nonfinite="nan"),
        lambda: QUANTIZER(x, SQUARE, nonfinite="nan"),
        lambda: QUANTIZER.swiglu_both(x, x[:, 0], ROW, nonfinite="nan"),
        lambda: GEMM(a, a),
        lambda: GEMM.grouped(a, weight, ends),
        lambda: GEMM.k_grouped(a, a, ends),
    ]
    for call in calls:
        with monkeypatch.context() as patch, counting(patch) as counts:
            call()
            assert counts() == (1, 0)
    with monkeypatch.context() as patch, counting(patch) as counts:
        QUANTIZER(x, ROW, nonfinite="raise")
        assert counts() == (1, 1)


def test_what_the_kernels_do_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # As for a caller.
    x = matrix(130, 130).to(DEVICE)
    a, b = QUANTIZER(x, ROW), QUANTIZER(x, SQUARE)
    ends = torch.tensor([130], dtype=torch.int32, device=DEVICE)
    refused = [
        (UnsupportedError, "Use quantize", lambda: QUANTIZER(x, Tile(3, 128))),
        (UnsupportedError, "256", lambda: QUANTIZER(x, Tile(1, 256))),
        (UnsupportedError, "float16", lambda: QUANTIZER(x, ROW, scale="float16")),
        (UsageError, "must be a Tile", lambda: QUANTIZER(x, (1, 128))),
        (ShapeError, "int64", lambda: QUANTIZER(x.long(), ROW)),
        (ShapeError, "float8", lambda: QUANTIZER(a.codes, ROW)),
        (ShapeError, r"\[130\]", lambda: QUANTIZER(x[0], ROW)),
        (ShapeError, "129", lambda: QUANTIZER.swiglu(x[:, 1:], None, ROW)),
        (ShapeError, r"\[2\]", lambda: QUANTIZER.swiglu(x, x[0, :2], ROW)),
        (UnsupportedError, "ReferenceGemm", lambda: GEMM(b, b)),
        (ShapeError, "do not multiply", lambda: GEMM(a, QUANTIZER(x[:, :9], ROW))),
        (ShapeError, "inner dim", lambda: GEMM(a, QUANTIZER(x, MX))),
        (ShapeError, "do not multiply", lambda: GEMM.grouped(a, b, ends)),
        (
            ShapeError,
            "as many offsets",
            lambda: GEMM.grouped(a, QUANTIZER(x[None], SQUARE), ends[:0]),
        ),
        (ShapeError, "vector", lambda: GEMM.k_grouped(a, a, ends[None])),
        (UnsupportedError, "float16", lambda: adapter.TritonGemm("float16")),
    ]
    for error, match, call in refused:
        with pytest.raises(error, match=match):
            call()


def test_engines_are_values():
    assert {adapter.TritonGemm(): 1}[adapter.TritonGemm("bfloat16")] == 1
    assert hash(adapter.TritonQuantizer()) == hash(adapter.TritonQuantizer())
    assert adapter.TritonGemm().k_major
