"""What tests of Triton kernels in its interpreter have in common."""

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNIT = 2.0**-24  # A result in float32 is off by a unit at most, relative to itself.


def drawn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
    from triton.runtime import interpreter

    def multiply(self, a, b, total, *_):
        found = np.zeros_like(total.data)
        for column, row in zip(a.data.T, b.data, strict=True):
            found += column[:, None] * row
        return interpreter.TensorHandle(found + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply)
