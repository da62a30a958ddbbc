"""Codes and scales against plain loops, the error bound, and what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import ShapeError, UsageError
from primeblocks.fp8 import Tile, measure_error, quantize, round_trip
from primeblocks.fp8.formats import E4M3_MAX

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))
TILES = st.tuples(st.integers(1, 16), st.integers(1, 16)).map(lambda sides: Tile(*sides))


def matrix(shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


def nearest_e4m3(x):
    """Round to nearest even on the E4M3 grid, by arithmetic alone."""
    if x == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(x))), -6)
    step = 2.0 ** (exponent - 3)
    return round(x / step) * step  # Python rounds halves to even


@given(SHAPES, TILES, st.integers(0, 3))
def test_it_equals_plain_loops(shape, tile, seed):
    x = matrix(shape, seed)
    q = quantize(x, tile)
    assert q.scales.shape == tile.grid(*shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            top, left = row - row % tile.rows, column - column % tile.columns
            part = x[top : top + tile.rows, left : left + tile.columns]
            scale = part.abs().max() / torch.tensor(E4M3_MAX)
            assert q.scales[row // tile.rows, column // tile.columns] == scale
            scaled = float(x[row, column] * (1 / scale))
            expected = nearest_e4m3(max(-E4M3_MAX, min(E4M3_MAX, scaled)))
            assert float(q.codes[row, column].float()) == expected


@given(SHAPES, TILES, st.sampled_from([1e-30, 1e-9, 1.0, 1e30]))
def test_the_error_is_at_most_a_28th_of_the_tiles_largest(shape, tile, scale):
    x = matrix(shape, scale=scale)
    error = (quantize(x, tile).dequantize(torch.float64) - x.double()).abs()
    for top in range(0, shape[0], tile.rows):
        for left in range(0, shape[1], tile.columns):
            rows, columns = slice(top, top + tile.rows), slice(left, left + tile.columns)
            bound = x[rows, columns].abs().max().double() / 28
            assert error[rows, columns].max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e-9, 1e-6, 1.0])
def test_small_gradients_keep_their_precision(scale):
    x = matrix((64, 256), scale=scale)
    assert measure_error(x, quantize(x, Tile(1, 128))) < 0.03


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
    once = round_trip(matrix(shape), tile)
    torch.testing.assert_close(round_trip(once, tile), once, rtol=3e-7, atol=0)


@given(SHAPES, TILES)
def test_transposing_rounds_nothing_again(shape, tile):
    q = quantize(matrix(shape), tile)
    assert torch.equal(q.transposed.dequantize(), q.dequantize().t())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad):
    x = matrix((4, 4))
    x[1, 2] = bad
    with pytest.raises(UsageError, match="1 of 16"):
        quantize(x, Tile(2, 2))


def test_other_bad_input_is_refused():
    with pytest.raises(ShapeError, match="int64"):
        quantize(torch.ones(2, 2, dtype=torch.int64), Tile(1, 1))
    with pytest.raises(ShapeError, match=r"\[2, 2, 2\]"):
        quantize(torch.ones(2, 2, 2), Tile(1, 1))
    with pytest.raises(UsageError, match="4 of 4"):
        quantize(torch.full((2, 2), 1e300, dtype=torch.float64), Tile(2, 2))
    with pytest.raises(UsageError, match="0 x 3"):
        Tile(0, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_codes_and_scales_on_a_gpu_equal_those_on_a_cpu():
    x = matrix((300, 500)).bfloat16()
    cpu, gpu = quantize(x, Tile(1, 128)), quantize(x.cuda(), Tile(1, 128))
    assert torch.equal(cpu.codes.view(torch.uint8), gpu.codes.cpu().view(torch.uint8))
    assert torch.equal(cpu.scales, gpu.scales.cpu())
