"""Block-scaled products of cuBLAS, through `torch.nn.functional.scaled_mm`.

    recipe = fp8.Recipe(gemm=CublasGemm(experts=TritonGemm()))

`CublasGemm` has run on one H100. On a CPU, tests check the arguments with torch's own shape
functions, and the values with a fake of `scaled_mm`. `CublasGemm` needs only torch, built for CUDA
12.9 or later, and a GPU of compute capability 9.0. On a GPU of another compute capability, cuBLAS
does not support tiles of 1 x 128.
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
_ALIGNED = 16  # Alignment, in bytes, of the addresses of scales and of the strides of columns.


def check_device(device: torch.device) -> None:
    """Check that `CublasGemm` can run on `device` with the installed torch. Local.

    The host does not wait for the device.

    Raises:
        UnsupportedError: the device is not a GPU of compute capability 9.0, or torch is not built
            for CUDA 12.9 or later.
    """
    check_hopper(device, _ENGINE)
    built = torch.version.cuda or "none"
    if built == "none" or tuple(map(int, built.split(".")[:2])) < (12, 9):
        raise UnsupportedError(
            f"CublasGemm needs torch built for CUDA 12.9 or later; this build is for {built}. "
            "Install a newer build, or use primeblocks.fp8.adapters.triton.TritonGemm()."
        )


@dataclass(frozen=True)
class CublasGemm:
    """A `Gemm` that multiplies dense matrices with cuBLAS.

    Tiles of `a` must be 1 x 128. If `b` has tiles of 128 x 128, as weights do, the result is
    bfloat16. If `b` has tiles of 1 x 128, the result is float32. Sizes must meet two conditions:

    - The number of rows is a multiple of 4 for `a`, and a multiple of 16 for `b`.
    - The inner dim is a multiple of 128. The number of rows of `b` is also a multiple of 128 if
      `b` has tiles of 128 x 128.

    A call launches one kernel that multiplies, and at most three kernels that copy or pad scales.
    Scales take at most 1/32 of the codes' bytes. Codes are not copied, and the host does not wait
    for the device. UE8M0 scales are supported if they are stored as float32.

    Args:
        experts: the `Gemm` for groups, because cuBLAS cannot multiply groups with block scales.

    Source: cuBLAS, "128-element 1D and 128x128 2D Block Scaling For FP8 Data Types".
    """

    experts: Gemm | None = None
    k_major: ClassVar[bool] = True

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply `a @ b.T`. Local.

        Raises:
            ShapeError: the operands are not two matrices, or their inner dims differ.
            UnsupportedError: cuBLAS does not take the sizes, the tiles or the device. Nothing was
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
        """Multiply each expert's rows of `a` by `b[expert].T` with the kernel `experts`. Local.

        Raises:
            UnsupportedError: `CublasGemm` was constructed without `experts`.
        """
        return self._of_experts("the rows of experts").grouped(a, b, offsets)

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Compute `a @ b.T` over each expert's tokens with the kernel `experts`. Local.

        Raises:
            UnsupportedError: `CublasGemm` was constructed without `experts`.
        """
        return self._of_experts("the tokens of experts").k_grouped(a, b, offsets)

    def _of_experts(self, what: str) -> Gemm:
        if self.experts is None:
            raise UnsupportedError(
                f"cuBLAS has no block-scaled product over {what}. Pass a kernel that has one, "
                "such as CublasGemm(experts=primeblocks.fp8.adapters.triton.TritonGemm())."
            )
        return self.experts


def _check(a: Quantized, b: Quantized) -> None:
    if a.codes.ndim != 2 or b.codes.ndim != 2:
        raise ShapeError(f"CublasGemm multiplies matrices; got {list(a.shape)} by {list(b.shape)}.")
    check_operands(a, b, _ENGINE)
    if a.shape[0] % 4 or b.shape[0] % 16:
        raise UnsupportedError(
            "CublasGemm needs rows in multiples of 4, and outputs in multiples of 16; got "
            f"{a.shape[0]} and {b.shape[0]}. Pad the tokens, exclude the layer, or use "
            "primeblocks.fp8.adapters.triton.TritonGemm(), which takes any number."
        )
    check_device(a.codes.device)


def _row_scales(scales: Tensor) -> Tensor:
    """Return scales of 1 x 128 tiles as `[rows, tiles]` with strides `(1, rows)`."""
    rows, tiles = scales.shape
    if scales.stride() == (1, rows) and _on_boundary(scales):
        return scales
    # Strides are set explicitly, because contiguous() may leave any stride for a dim of size 1.
    return scales.new_empty_strided((rows, tiles), (1, rows)).copy_(scales)


def _square_scales(scales: Tensor) -> Tensor:
    """Return scales of 128 x 128 tiles as `[tiles of in, tiles of out]`, with stride 1 along in.

    The first dim is padded with ones to a multiple of 4, so that columns start at multiples of 16
    bytes.
    """
    down, across = scales.shape
    padded = -(-across // 4) * 4
    if padded == across and scales.is_contiguous() and _on_boundary(scales):
        return scales.as_strided((padded, down), (1, padded))
    laid = scales.new_ones(down, padded)
    laid[:, :across] = scales
    return laid.as_strided((padded, down), (1, padded))


def _on_boundary(scales: Tensor) -> bool:
    # Allocations start at multiples of 512 bytes, so the offset shows the alignment.
    return scales.storage_offset() * scales.element_size() % _ALIGNED == 0
