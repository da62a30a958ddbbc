"""Shared by tests of Triton kernels: skips them where neither interpreter nor GPU is at hand."""

import pytest
import torch

from primeblocks.fp8 import Quantized, Tile
from primeblocks.fp8.reference import ReferenceGemm

triton = pytest.importorskip("triton", reason="triton is not installed; scripts/peers does")
INTERPRETED = triton.knobs.runtime.interpret
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from primeblocks.fp8.adapters import triton as adapter  # noqa: E402

# The same comparisons on both; a program takes the interpreter about 10 ms, so sizes are small.
MARKS = [
    # Of NumPy, about the loops of the interpreter of Triton 3.6.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
ROW, SQUARE, MX = Tile(1, 128), Tile(128, 128), Tile(1, 32)
QUANTIZER, GEMM, REFERENCE = (
    adapter.TritonQuantizer(),
    adapter.TritonGemm("float32"),
    ReferenceGemm(),
)


def matrix(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


def on_device(q):
    return Quantized(q.codes.to(DEVICE), q.scales.to(DEVICE), q.tile)


def assert_same(found, expected):
    assert found.tile == expected.tile
    assert found.codes.dtype == torch.float8_e4m3fn
    codes = found.codes.cpu().contiguous().view(torch.uint8)
    # Torch keeps the sign of a NaN, a GPU does not.
    expected_codes = expected.codes.contiguous().view(torch.uint8)
    expected_codes = expected_codes.masked_fill(expected.codes.float().isnan(), 0x7F)
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(found.scales.cpu(), expected.scales, rtol=0, atol=0, equal_nan=True)


def on_cpu(q):
    return Quantized(q.codes.cpu(), q.scales.cpu(), q.tile)
