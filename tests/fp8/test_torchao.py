"""Codes and scales against the reference quantizers of torchao 0.18.0, in plain torch on a CPU.

Its blockwise ones are `quotient="amax"`: the codes are ours to the bit wherever its floor of 1e-12
under a tile's largest value does not bind. Its MXFP8 with RCEIL is ours except beside powers of
two, where a logarithm loses the last bits, and below 2**-126, where it stores 2**-127 but scales by
1. Each difference is asserted to be this one and no other.
"""

import logging
import warnings

import pytest
import torch

from primeblocks.fp8 import Tile, quantize
from primeblocks.fp8.quantize import E4M3_MAX, scales_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Its source has escapes that Python 3.11 warns of.
    logging.disable(logging.WARNING)  # It tells of its CUDA libraries, which do not load here.
    try:
        torchao = pytest.importorskip("torchao", reason="the peer is not installed")
        from torchao.prototype.blockwise_fp8_training import kernels as blockwise
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    finally:
        logging.disable(logging.NOTSET)

ROW, SQUARE, MX = Tile(1, 128), Tile(128, 128), Tile(1, 32)
FLOOR = 1e-12  # Of a tile's largest value, in torchao's blockwise quantizers.
DTYPES = [torch.float32, torch.bfloat16]


def gaussian(dtype, scale):
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)) * scale
    return x.to(dtype)


def adversarial(dtype):
    """Ties between codes, values beside powers of two, signed zeros, single peaks, tiles of zeros.

    The first value of each 32 sets the amax: near a power of two, at all exponents above torchao's
    floor, so that values of the tile land on every halfway point of the code's grid and beside it.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (128, 512)
    codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
    grid = codes.view(torch.float8_e4m3fn).float()
    halfway = (grid + (codes + 1).clamp(max=126).view(torch.float8_e4m3fn).float()) / 2
    nudge = 1 + 2.0**-23 * torch.randint(-2, 3, shape, generator=generator)
    x = halfway * nudge * torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    peaks = E4M3_MAX * (1 + 2.0**-23 * torch.randint(-3, 4, (128, 4), generator=generator))
    x[:, ::128] = peaks
    x *= 2.0 ** torch.randint(-40, 60, (128, 1), generator=generator)
    x[7], x[11, 1:128], x[13] = 0.0, 0.0, -0.0
    return x.to(dtype)


def inputs(dtype):
    yield from (gaussian(dtype, scale) for scale in (1.0, 1e-5, 1e-10, 1e20))
    yield adversarial(dtype)


def assert_same_codes(ours, theirs):
    assert torch.equal(ours.codes.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def assert_reciprocal_scales(x, tile, ours, theirs):
    """Their scale is `1 / (448 / amax)`, rounded twice; ours `amax / 448`, rounded once.

    Each rounding errs by at most half a unit, 2**-24: three of them part the two.
    """
    amax = x.float().abs().unflatten(0, (-1, tile.rows)).unflatten(-1, (-1, tile.columns))
    amax = amax.amax((1, 3))
    _, factor = scales_of(amax, "float32", "amax")
    assert (amax[amax > 0] >= FLOOR).all()
    some = amax > 0
    assert torch.equal(theirs[some], 1.0 / factor[some])
    off = (theirs[some].double() / ours.scales[some].double() - 1).abs()
    assert off.max() <= 3.01 * 2.0**-24
    assert (ours.scales[~some] == 1).all()
    assert torch.equal(theirs[~some], torch.full_like(theirs[~some], 1 / (E4M3_MAX / FLOOR)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_have_the_codes_of_torchao(dtype):
    for x in inputs(dtype):
        ours = quantize(x, ROW, quotient="amax")
        codes, scales = blockwise.torch_blockwise_scale_act_quant_lhs(x)
        assert_same_codes(ours, codes)
        assert_reciprocal_scales(x, ROW, ours, scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_along_the_tokens_have_the_codes_of_torchao(dtype):
    for whole in inputs(dtype):
        x = whole[:, :128].contiguous()  # Its reference goes column by column.
        columns = x.mT.contiguous()
        ours = quantize(columns, ROW, quotient="amax")
        codes, scales = blockwise.torch_blockwise_scale_act_quant_rhs(x)
        assert_same_codes(ours, codes.mT)
        if dtype is torch.float32:  # It rounds its floor to the dtype of x.
            assert_reciprocal_scales(columns, ROW, ours, scales.mT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_have_the_codes_of_torchao(dtype):
    for x in inputs(dtype):
        ours = quantize(x, SQUARE, quotient="amax")
        codes, scales = blockwise.torch_blockwise_scale_weight_quant(x)
        assert_same_codes(ours, codes)
        assert_reciprocal_scales(x, SQUARE, ours, scales)


def mx(x, mode):
    """Codes and scales of torchao's MXFP8; E8M0 exponents as float32."""
    scales, codes = to_mx(x, torch.float8_e4m3fn, MX.columns, mode)
    exponents = scales.view(torch.uint8).int() - 127
    return codes, torch.ldexp(torch.ones(exponents.shape), exponents)


def tiles_of(x):
    return x.float().unflatten(-1, (-1, MX.columns))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8_is_that_of_torchao(dtype):
    """Where they differ the scale lies within a rounded logarithm above a power of two, `2**k`.

    There `log2` rounds to `k`, and torchao's scale is half of ours; its values saturate. The step
    of float32 below 128 is 2**-17, so the mantissa's excess is at most 2**-18 * ln 2.
    """
    seen = 0
    for x in (*inputs(dtype), powers_of_two(dtype)):
        ours = quantize(x, MX, scale="ue8m0")
        codes, scales = mx(x, ScaleCalculationMode.RCEIL)
        some = tiles_of(x).abs().amax(-1) > 0
        rounded_down = some & (scales != ours.scales)
        wanted = tiles_of(x).abs().amax(-1) / E4M3_MAX
        excess = wanted[rounded_down] / scales[rounded_down] - 1
        assert torch.equal(2 * scales[rounded_down], ours.scales[rounded_down])
        assert ((excess > 0) & (excess <= 2.0**-18)).all()
        same = ~rounded_down
        pairs = [t.view(torch.uint8).unflatten(-1, (-1, 32))[same] for t in (ours.codes, codes)]
        assert torch.equal(*pairs)
        assert (scales[~some] == 2.0**-127).all()  # Ours is 1; the codes are zeros in both.
        seen += int(rounded_down.sum())
    # A processor whose log2 does not round has none. Values of bfloat16 lie 2**-7 apart.
    assert seen == 0 or dtype is torch.float32


def powers_of_two(dtype):
    """Tiles whose scale lies n steps above a power of two, for every exponent to 2**-126."""
    steps = torch.arange(32)
    exponents = torch.arange(-125.0, 100.0)[:, None]
    largest = E4M3_MAX * (1 + steps * 2.0**-23) * 2.0**exponents
    x = torch.rand(225, 32, 32, generator=torch.Generator().manual_seed(2)) * largest[..., None]
    x[..., 0] = largest
    return x.flatten(1).to(dtype)


def test_below_float32s_normal_scales_torchao_loses_what_ours_keeps():
    """Its exponent 0 means 2**-127, but it multiplies by 1: every code is zero."""
    x = torch.full((1, 32), E4M3_MAX * 2.0**-127)
    codes, scales = mx(x, ScaleCalculationMode.RCEIL)
    assert (codes.float() == 0).all()
    assert (scales == 2.0**-127).all()
    ours = quantize(x, MX, scale="ue8m0")
    assert (ours.scales == 2.0**-126).all()
    assert torch.equal(ours.dequantize(torch.float64), x.double())
