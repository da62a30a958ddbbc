"""What tests of Triton kernels have in common, in Triton's interpreter or on a CUDA device.

They have never run on a device.
"""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed; scripts/peers does")
INTERPRETED = triton.knobs.runtime.interpret
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from primeblocks.exact.adapters import triton as kernels  # noqa: E402

__all__ = [
    "DEVICE",
    "DTYPES",
    "MARKS",
    "UNIT",
    "assert_within",
    "drawn",
    "kernels",
    "multiply_tiles_in_order",
    "rounding",
]

DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [
    # Of NumPy, about the loops of the interpreter of Triton 3.6.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNIT = 2.0**-24  # A result in float32 is off by a unit at most, relative to itself.


def drawn(*shape, seed, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(DEVICE, dtype)


def rounding(dtype, values):
    """The largest error of a result that is rounded to a dtype, also if it is subnormal there."""
    info = torch.finfo(dtype)
    return values.abs() * info.eps / 2 + info.smallest_normal * info.eps


def assert_within(found, wanted, limit):
    assert ((found.double() - wanted).abs() <= limit).all()


def multiply_tiles_in_order(monkeypatch):
    """Let the interpreter multiply tiles in the order of `k`.

    NumPy's `matmul`, which it uses, gives a row of a tile other bits at another place.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def multiply(self, a, b, total, *_):
        found = np.zeros_like(total.data)
        for column, row in zip(a.data.T, b.data, strict=True):
            found += column[:, None] * row
        return interpreter.TensorHandle(found + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply)
