"""Codes and scales against plain loops, the error bound, and what is refused."""

import math
import struct
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import ShapeError, UsageError
from primeblocks.fp8 import Quantized, Tile, measure_error, quantize
from primeblocks.fp8.quantize import E4M3_MAX, Quotient, Scale

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))
SCALES, QUOTIENTS = st.sampled_from(get_args(Scale)), st.sampled_from(get_args(Quotient))
TILES = st.tuples(st.integers(1, 16), st.integers(1, 16)).map(lambda sides: Tile(*sides))


def matrix(shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


def same(one, other):
    """Bit for bit, but for the sign of a NaN."""
    nan, other_nan = one.codes.float().isnan(), other.codes.float().isnan()
    a, b = (x.codes.contiguous().view(torch.uint8).masked_fill(nan, 0) for x in (one, other))
    scales = torch.equal(one.scales.nan_to_num(-1.0), other.scales.nan_to_num(-1.0))
    return torch.equal(nan, other_nan) and torch.equal(a, b) and scales


def nearest_e4m3(x):
    """Round to nearest even on the E4M3 grid, by arithmetic alone."""
    if x == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(x))), -6)
    step = 2.0 ** (exponent - 3)
    return round(x / step) * step  # Python rounds halves to even


def float32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def definition(amax, scale, quotient):
    """A tile's scale, and how a value of it is scaled: in float64, each step rounded to float32.

    A quotient or product of two float32 that is rounded to float64 first rounds to the same
    float32 (53 >= 2 x 24 + 2).
    """
    size = max(float32(amax / E4M3_MAX), 2.0**-126) if amax else 1.0
    if scale == "ue8m0":
        mantissa, exponent = math.frexp(size)
        size = 2.0 ** (exponent - (mantissa == 0.5))
    if quotient == "division":
        return size, lambda x: float32(x / size)
    factor = float32(1 / size)
    if quotient == "amax" and scale == "float32" and amax:
        factor = min(float32(E4M3_MAX / amax), 2.0**126) if amax > 1e-36 else 2.0**126
    return size, lambda x: float32(x * factor)


@given(SHAPES, TILES, st.sampled_from([1.0, 1e-9, 1e-20]), SCALES, QUOTIENTS, st.integers(0, 99))
def test_it_equals_plain_loops(shape, tile, magnitude, scale, quotient, seed):
    x = matrix(shape, seed, magnitude).bfloat16().float()  # few bits: many ties, or next to them
    x[0, 0] = 2.0 ** math.floor(math.log2(magnitude)) * E4M3_MAX  # a scale that is a power of two
    q = quantize(x, tile, scale=scale, quotient=quotient)
    assert q.scales.shape == tile.grid(*shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            top, left = row - row % tile.rows, column - column % tile.columns
            part = x[top : top + tile.rows, left : left + tile.columns]
            size, scaled = definition(float(part.abs().max()), scale, quotient)
            assert q.scales[row // tile.rows, column // tile.columns] == size
            value = max(-E4M3_MAX, min(E4M3_MAX, scaled(float(x[row, column]))))
            assert float(q.codes[row, column].float()) == nearest_e4m3(value)


@given(SHAPES, TILES, SCALES, QUOTIENTS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_batch_is_its_matrices(shape, tile, scale, quotient, dtype):
    x = torch.stack([matrix(shape, seed) for seed in range(3)]).to(dtype)
    q = quantize(x, tile, scale=scale, quotient=quotient)
    for index, one in enumerate(x):
        alone = quantize(one, tile, scale=scale, quotient=quotient)
        assert same(Quantized(q.codes[index], q.scales[index], tile), alone)


def test_parts_that_fit_a_cache_are_no_tiles_of_their_own():
    x = matrix((1030, 700)).bfloat16()  # several parts, the last one smaller
    q = quantize(x, Tile(128, 128))
    for row in range(0, 1030, 128):
        alone = quantize(x[row : row + 128], Tile(128, 128))
        part = Quantized(q.codes[row : row + 128], q.scales[row // 128, None], q.tile)
        assert same(part, alone)


def test_where_float32_ends_precision_fades_and_nothing_is_refused():
    for scale in (1e-36, 1e-38, 1e-44):
        x = matrix((64, 256), scale=scale)
        error = (quantize(x, Tile(1, 128)).dequantize(torch.float64) - x.double()).abs()
        bound = x.abs().double() / 16 + 2.0**-136  # half a step of a code, at the smallest scale
        assert (error <= bound).all()


def test_zeros_have_scale_one():
    q = quantize(torch.zeros(3, 200), Tile(1, 128))
    assert (q.scales == 1).all()
    assert (q.dequantize() == 0).all()
    assert measure_error(torch.zeros(3, 200), q) == 0


@given(SHAPES, TILES)
def test_what_was_rounded_stays(shape, tile):
    once = quantize(matrix(shape), tile).dequantize()
    torch.testing.assert_close(quantize(once, tile).dequantize(), once, rtol=3e-7, atol=0)


@given(SHAPES, TILES)
def test_transposing_rounds_nothing_again(shape, tile):
    q = quantize(matrix(shape), tile)
    assert torch.equal(q.transposed.dequantize(), q.dequantize().t())


def test_on_request_they_pass_as_nan_and_harm_no_other_tile():
    x = matrix((4, 8))
    x[1, 2], x[3, 7] = torch.inf, torch.nan
    q = quantize(x, Tile(1, 4), nonfinite="nan")
    hit = torch.zeros(4, 2, dtype=torch.bool)
    hit[1, 0] = hit[3, 1] = True
    assert torch.equal(q.scales.isnan(), hit)
    whole = hit.repeat_interleave(4, dim=1)
    assert torch.equal(q.dequantize().isnan(), whole)
    clean = quantize(x.masked_fill(whole, 0), Tile(1, 4))
    assert torch.equal(q.dequantize().masked_fill(whole, 0), clean.dequantize())


def test_other_bad_input_is_refused():
    with pytest.raises(ShapeError, match="int64"):
        quantize(torch.ones(2, 2, dtype=torch.int64), Tile(1, 1))
    with pytest.raises(ShapeError, match=r"\[2\]"):
        quantize(torch.ones(2), Tile(1, 1))
    with pytest.raises(UsageError, match="4 of 4"):
        quantize(torch.full((2, 2), 1e300, dtype=torch.float64), Tile(2, 2))
    with pytest.raises(UsageError, match="0 x 3"):
        Tile(0, 3)
