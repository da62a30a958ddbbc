"""Float8 products on machines without units for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .quantize import Quantized
from .reference import check_inner, runs

__all__ = ["SimulatedGemm"]


@dataclass(frozen=True)
class SimulatedGemm:
    """Float32 products of what codes and scales say, by torch; see `Gemm`.

    Operands are rounded as everywhere; of a sum only the rounding to float32 differs from
    `ReferenceGemm`'s. For training at small scale on a CPU, or on a GPU without float8, where
    grouped products read `offsets` on the host.
    """

    k_major: ClassVar[bool] = False

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply `a @ b.T`, float32 `[rows of a, rows of b]`. Local.

        Raises:
            ShapeError: the inner dims or their tiles differ.
        """
        check_inner(a, b)
        return a.dequantize() @ b.dequantize().mT

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Multiply each expert's rows by its matrix; float32. Local.

        Raises:
            ShapeError: the inner dims or their tiles differ.
        """
        check_inner(a, b)
        rows, weights = a.dequantize(), b.dequantize().mT
        out = rows.new_zeros(len(rows), weights.shape[-1])
        for expert, run in enumerate(runs(offsets)):
            torch.mm(rows[run], weights[expert], out=out[run])
        return out

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Multiply `a @ b.T` over each expert's part of the inner dim; float32. Local.

        Raises:
            ShapeError: the inner dims or their tiles differ.
        """
        check_inner(a, b)
        left, right = a.dequantize(), b.dequantize().mT
        return torch.stack([left[:, run] @ right[run] for run in runs(offsets)])
