"""The contract of an engine of matrix products."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .quantize import Quantized

__all__ = ["Gemm"]


class Gemm(Protocol):
    """An engine: `a @ b.T` of two quantized matrices, float32. Hashable, as part of a Recipe."""

    def __call__(self, a: Quantized, b: Quantized) -> Tensor: ...

    def __hash__(self) -> int: ...
