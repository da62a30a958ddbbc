"""cuBLAS's block-scaled products through `torch.nn.functional.scaled_mm`, run on one H100.

    recipe = fp8.Recipe(gemm=CublasGemm(experts=TritonGemm()))

Calls are also checked on a CPU against torch's own shape functions. Needs nothing but torch, built
for CUDA 12.9 or later, and a GPU of compute capability 9.0, the only one for which cuBLAS has these
tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from ...errors import ShapeError, UnsupportedError
from ..hopper import SQUARE, check_hopper, check_operands
from ..quantize import Quantized
from ..recipe import Gemm

__all__ = ["CublasGemm", "check_device"]

_ENGINE = "CublasGemm"
_ALIGNED = 16  # Bytes: addresses of scales, and strides from one column of them to the next.


def check_device(device: torch.device) -> None:
    """Refuse a device on which cuBLAS has no such product. Local; no host wait.

    Raises:
        UnsupportedError: no CUDA device of compute capability 9.0, or torch is built for an
            earlier CUDA than 12.9.
    """
    check_hopper(device, _ENGINE)
    built = torch.version.cuda or "none"
    if built == "none" or tuple(map(int, built.split(".")[:2])) < (12, 9):
        raise UnsupportedError(
            f"CublasGemm needs torch built for CUDA 12.9 or later; this one is for {built}. "
            "Install a newer build, or use primeblocks.fp8.adapters.triton.TritonGemm()."
        )


@dataclass(frozen=True)
class CublasGemm:
    """Dense products of quantized matrices by cuBLAS; see `Gemm`.

    `a` has tiles of 1 x 128. With weights of 128 x 128 the result is bfloat16; with tiles of
    1 x 128 on both sides, as gradients of weights have, float32. The number of rows on either side
    is a multiple of 4, that of `b` of 16; the inner dim, and both sides of weights, of 128.

    One launch, and one to two that lay scales out: copies of a 32nd of the codes' bytes at most.
    Codes are not copied, and no host waits. UE8M0 scales are float32 here, and fine.

    cuBLAS has no block-scaled product of groups. A loop over experts would have to know their
    sizes, for which the host waits; so those products belong to another engine, `experts`. It is
    passed in like every engine: a recipe names all that multiplies.

    Args:
        experts: multiplies groups.

    Source: cuBLAS, "128-element 1D and 128x128 2D Block Scaling For FP8 Data Types".
    """

    experts: Gemm | None = None
    k_major: ClassVar[bool] = True

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply `a @ b.T`. Local.

        Raises:
            ShapeError: no two matrices, or their inner dims differ.
            UnsupportedError: sizes, tiles or a device that cuBLAS does not take; nothing was
                launched.
        """
        _check(a, b)
        square = b.tile == SQUARE
        dtype = torch.bfloat16 if square else torch.float32
        if not a.codes.numel() or not b.codes.numel():
            return a.scales.new_zeros(a.shape[0], b.shape[0], dtype=dtype)
        return F.scaled_mm(
            a.codes,
            b.codes.t(),
            scale_a=_row_scales(a.scales),
            scale_recipe_a=ScalingType.BlockWise1x128,
            scale_b=_square_scales(b.scales) if square else _row_scales(b.scales),
            scale_recipe_b=ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128,
            output_dtype=dtype,
        )

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Let `experts` multiply each expert's rows by its matrix. Local.

        Raises:
            UnsupportedError: there is none.
        """
        return self._of_experts("the rows of experts").grouped(a, b, offsets)

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Let `experts` multiply over each expert's tokens. Local.

        Raises:
            UnsupportedError: there is none.
        """
        return self._of_experts("the tokens of experts").k_grouped(a, b, offsets)

    def _of_experts(self, what: str) -> Gemm:
        if self.experts is None:
            raise UnsupportedError(
                f"cuBLAS has no block-scaled product over {what}. Pass an engine that has, such as "
                "CublasGemm(experts=primeblocks.fp8.adapters.triton.TritonGemm())."
            )
        return self.experts


def _check(a: Quantized, b: Quantized) -> None:
    if a.codes.ndim != 2 or b.codes.ndim != 2:
        raise ShapeError(f"CublasGemm multiplies matrices; got {list(a.shape)} by {list(b.shape)}")
    check_operands(a, b, _ENGINE)
    if a.shape[0] % 4 or b.shape[0] % 16:
        raise UnsupportedError(
            f"CublasGemm needs rows in multiples of 4, and outputs in multiples of 16; got "
            f"{a.shape[0]} and {b.shape[0]}. Pad the tokens, or exclude the layer; "
            "primeblocks.fp8.adapters.triton.TritonGemm() takes any number."
        )
    check_device(a.codes.device)


def _row_scales(scales: Tensor) -> Tensor:
    """Scales of 1 x 128 tiles with the rows innermost, `[rows, tiles]` of strides `(1, rows)`."""
    rows, tiles = scales.shape
    if scales.stride() == (1, rows) and _on_boundary(scales):
        return scales
    # Strides given outright: of a dim of size 1, contiguous() would leave any.
    return scales.new_empty_strided((rows, tiles), (1, rows)).copy_(scales)


def _square_scales(scales: Tensor) -> Tensor:
    """Scales of 128 x 128 tiles, `[tiles of in, tiles of out]` with those of `in` innermost.

    The first number is filled up to a multiple of 4 with ones, so that columns lie 16 bytes apart.
    """
    down, across = scales.shape
    padded = -(-across // 4) * 4
    if padded == across and scales.is_contiguous() and _on_boundary(scales):
        return scales.as_strided((padded, down), (1, padded))
    laid = scales.new_ones(down, padded)
    laid[:, :across] = scales
    return laid.as_strided((padded, down), (1, padded))


def _on_boundary(scales: Tensor) -> bool:
    # Allocations lie on multiples of 512 bytes, so the offset tells.
    return scales.storage_offset() * scales.element_size() % _ALIGNED == 0
