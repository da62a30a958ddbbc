"""Quantization compiled by Numba: the bits of `quantize`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import UnsupportedError, UsageError
from primeblocks.fp8 import Recipe, Tile, matmul, quantize
from tests.fp8.test_quantize import QUOTIENTS, SCALES, SHAPES, TILES, matrix, same

numba = pytest.importorskip("numba", reason="numba is not installed")
from primeblocks.fp8.adapters.numba import NumbaQuantizer  # noqa: E402

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
SIZES = st.sampled_from([1e-44, 1e-38, 1e-30, 1e-9, 1.0, 1e30])


@given(SHAPES, TILES, DTYPES, SIZES, SCALES, QUOTIENTS, st.integers(0, 99), st.booleans())
def test_it_gives_the_same_bits(shape, tile, dtype, size, scale, quotient, seed, flipped):
    x = torch.stack([matrix(shape, seed + k) for k in range(2)]).double().mul(size).to(dtype)
    x[0, 0] = 0
    x = x.mT if flipped else x
    how = {"scale": scale, "quotient": quotient, "nonfinite": "nan"}
    assert same(NumbaQuantizer()(x, tile, **how), quantize(x, tile, **how))


def test_every_value_of_bfloat16_becomes_the_same_code():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = every[every.isfinite()].reshape(-1, 128)
    assert same(NumbaQuantizer()(rows, Tile(1, 128)), quantize(rows, Tile(1, 128)))
    # Scaled by 1: each float32 beside a tie, and the codes' own values.
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]
    ties = (codes[:-1] + codes[1:]) / 2
    beside = torch.cat([ties.nextafter(ties + 1), ties, ties.nextafter(ties - 1), codes])
    rows = torch.stack([beside, torch.full_like(beside, 448.0)], dim=1)
    made = NumbaQuantizer()(rows, Tile(1, 2))
    assert (made.scales == 1).all()
    assert same(made, quantize(rows, Tile(1, 2)))


@pytest.mark.parametrize("tile", [Tile(1, 128), Tile(128, 128)])
def test_threads_change_nothing(tile):
    x = matrix((1100, 1536)).bfloat16()
    alone = NumbaQuantizer()(x, tile)
    torch.set_num_threads(3)
    try:
        assert same(NumbaQuantizer()(x, tile), alone)
    finally:
        torch.set_num_threads(1)
    assert same(alone, quantize(x, tile))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused_or_passes_as_nan(bad):
    x = matrix((4, 8))
    x[1, 2] = bad
    with pytest.raises(UsageError, match="1 of 32"):
        NumbaQuantizer()(x, Tile(1, 4))
    how = {"nonfinite": "nan"}
    assert same(NumbaQuantizer()(x, Tile(1, 4), **how), quantize(x, Tile(1, 4), **how))


def test_a_recipe_takes_it():
    x, weight = matrix((5, 256)), matrix((128, 256), seed=1)
    y = matmul(x, weight, recipe=Recipe(quantizer=NumbaQuantizer()))
    assert torch.equal(y, matmul(x, weight, recipe=Recipe()))
    recipe = Recipe(quantizer=NumbaQuantizer())
    for made, expected in zip(recipe.quantize_both(x, Tile(1, 128)), (x, x.mT), strict=True):
        assert same(made, quantize(expected, Tile(1, 128)))
    with pytest.raises(UnsupportedError, match="needs x on the CPU; got x on meta"):
        NumbaQuantizer()(torch.empty(2, 2, device="meta"), Tile(1, 1))
