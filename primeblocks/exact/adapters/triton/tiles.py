"""Rounding and products of tiles, and the operands that the kernels support."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import UnsupportedError

__all__ = ["check", "dot", "round_to"]

# Decided at import, as Triton itself does.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
_EMULATED = tl.constexpr(_INTERPRETED)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
@no_type_check
def round_to(x, DTYPE: tl.constexpr):
    """Round float32 to DTYPE, ties to even."""
    if _EMULATED and tl.bfloat16 == DTYPE:  # The interpreter truncates.
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        number = (bits & 0x7FFFFFFF) <= 0x7F800000
        x = tl.where(number, near.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
@no_type_check
def dot(left, right, found):
    """Add a product of two tiles to `found`."""
    if _EMULATED:  # The interpreter takes the bits of bfloat16 for integers.
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, found, input_precision="ieee")


def check(*tensors: Tensor) -> None:
    """Raise `UnsupportedError` for gradients, another dtype, or tensors on a CPU. Local."""
    for x in tensors:
        if not (x.is_cuda or _INTERPRETED):
            raise UnsupportedError(
                f"Triton runs on CUDA tensors; got one on {x.device}. Use batch_invariant() on a "
                "CPU. To test small sizes, set TRITON_INTERPRET=1 before the import."
            )
        if x.dtype not in _DTYPES or (x.requires_grad and torch.is_grad_enabled()):
            raise UnsupportedError(
                "the kernels take float32, bfloat16 and float16, and compute no gradients; got "
                f"{x.dtype}, requires_grad={x.requires_grad}. Call them inside torch.no_grad()."
            )
