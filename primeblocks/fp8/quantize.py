"""Block-scaled float8: codes, scales, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from ..errors import ShapeError, UsageError
from ..groups import check_tensors
from .formats import E4M3_MAX, Tile, check_tile

__all__ = ["Quantized", "measure_error", "quantize", "round_trip"]


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix as float8 codes and one float32 scale a tile: value = code * scale.

    Args:
        codes: float8_e4m3fn `[rows, columns]`.
        scales: `[row tiles, column tiles]`.
    """

    codes: Tensor
    scales: Float32[Tensor, "row_tiles column_tiles"]
    tile: Tile

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def transposed(self) -> Quantized:
        """The transposed matrix, from the same codes; nothing is rounded again."""
        return Quantized(self.codes.t(), self.scales.t(), self.tile.transposed)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Code times scale, computed in `dtype`. Local."""
        return self.codes.to(dtype) * _spread(self.scales.to(dtype), self.tile, self.shape)


def quantize(x: Tensor, tile: Tile) -> Quantized:
    """Round a matrix to E4M3 with one scale a tile, so that its largest value becomes 448.

    The scale has no floor but float32's own, a normal number, so a tile of gradients keeps its
    relative precision down to a largest value of 5e-36. A tile of zeros has scale 1. Codes are
    `x * (1 / scale)` rounded to nearest even, in float32. Local; the host waits for the device.

    Raises:
        ShapeError: not a matrix of floating-point numbers.
        UsageError: a value is not finite in float32, or `tile` is no `Tile`.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3; the quotient as DeepGEMM takes it.
    """
    check_tile("tile", tile)
    check_tensors(x=x)
    if x.ndim != 2 or not x.is_floating_point():
        raise ShapeError(f"quantize takes a floating-point matrix; got {x.dtype} {list(x.shape)}")
    rows, columns = x.shape
    values = _tiled(x.detach().float(), tile)
    amax = values.abs().amax(dim=(1, 3))
    if not amax.isfinite().all():
        bad = int((~values.isfinite()).sum())
        raise UsageError(f"{bad} of {x.numel()} values are not finite; float8 has no infinity")
    # The reciprocal of a subnormal scale would be infinite.
    scales = (amax / E4M3_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    scales = torch.where(amax > 0, scales, 1.0)
    inverse = scales.reciprocal()
    scaled = values * inverse[:, None, :, None]
    # Explicit: a cast beyond the range saturates since torch 2.12 and gave NaN before.
    codes = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Quantized(codes.flatten(2, 3).flatten(0, 1)[:rows, :columns], scales, tile)


def round_trip(x: Tensor, tile: Tile) -> Tensor:
    """The nearest matrix that float8 codes can express, in the dtype of `x`. Local."""
    return quantize(x, tile).dequantize().to(x.dtype)


def measure_error(x: Tensor, quantized: Quantized) -> float:
    """The relative error in the Frobenius norm, in float64; 0 for zeros. Local."""
    check_tensors(x=x)
    if not isinstance(quantized, Quantized) or x.shape != quantized.shape:
        shape = getattr(quantized, "shape", None)
        raise ShapeError(f"needs x and what quantize made of it; got {list(x.shape)} and {shape}")
    exact = x.detach().double()
    norm = exact.norm()
    if norm == 0:
        return 0.0
    return float((quantized.dequantize(torch.float64) - exact).norm() / norm)


def _tiled(x: Tensor, tile: Tile) -> Tensor:
    """`[row tiles, rows, column tiles, columns]`, filled up with zeros."""
    down, across = tile.grid(*x.shape)
    padding = (0, across * tile.columns - x.shape[1], 0, down * tile.rows - x.shape[0])
    whole = torch.nn.functional.pad(x, padding) if any(padding) else x
    return whole.reshape(down, tile.rows, across, tile.columns)


def _spread(scales: Tensor, tile: Tile, shape: tuple[int, int]) -> Tensor:
    """Repeat scales, one for each element."""
    by_row = scales.repeat_interleave(tile.rows, dim=0)[: shape[0]]
    return by_row.repeat_interleave(tile.columns, dim=1)[:, : shape[1]]
