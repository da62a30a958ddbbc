"""Block-scaled products in torch: a bit-exact reference, and a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ShapeError
from .quantize import Quantized, Tile

__all__ = ["ReferenceGemm", "SimulatedGemm", "runs"]


@dataclass(frozen=True)
class ReferenceGemm:
    """A `Gemm` that defines the result of products bit for bit, on any device.

    Within one tile of the inner dim, products of codes are summed exactly in float64 and rounded to
    float32. Then `total = fma(a_scale * b_scale, sum, total)` adds these sums in float32, tile
    after tile. Results are float32, and do not depend on threads, libraries or the order inside a
    tile.

    Hopper's tensor cores accumulate with fewer bits than float32, so kernels on tensor cores agree
    with this class only within a tolerance. Local. The host waits for the values of `offsets`.

    Raises:
        ShapeError: raised by a product if the inner dims of the operands, or the numbers of columns
            of tiles, differ.
    """

    k_major: ClassVar[bool] = False

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        _check_inner(a, b)
        return _product(a, b, slice(0, a.shape[-1]))

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        _check_inner(a, b)
        out, by_row = a.scales.new_zeros(a.shape[0], b.shape[-2]), _by_row(a)
        for expert, rows in enumerate(runs(offsets)):
            of_a = Quantized(a.codes[rows], by_row[rows], Tile(1, a.tile.columns))
            out[rows] = self(of_a, Quantized(b.codes[expert], b.scales[expert], b.tile))
        return out

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        _check_inner(a, b)
        return torch.stack([_product(a, b, part) for part in runs(offsets)])


@dataclass(frozen=True)
class SimulatedGemm:
    """A `Gemm` that multiplies dequantized matrices in float32 with torch.

    Results are float32, and differ from `ReferenceGemm` only by rounding in float32. Use this class
    to train small models on a CPU, or on a GPU without float8. Local. The host waits for the values
    of `offsets`.

    Raises:
        ShapeError: raised by a product if the inner dims of the operands, or the numbers of columns
            of tiles, differ.
    """

    k_major: ClassVar[bool] = False

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        _check_inner(a, b)
        return a.dequantize() @ b.dequantize().mT

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        _check_inner(a, b)
        rows, weights = a.dequantize(), b.dequantize().mT
        out = rows.new_zeros(len(rows), weights.shape[-1])
        for expert, run in enumerate(runs(offsets)):
            torch.mm(rows[run], weights[expert], out=out[run])
        return out

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        _check_inner(a, b)
        left, right = a.dequantize(), b.dequantize().mT
        return torch.stack([left[:, run] @ right[run] for run in runs(offsets)])


def runs(offsets: Tensor) -> list[slice]:
    """Return one slice of rows per expert. The host waits for the values of `offsets`. Local."""
    ends = offsets.tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _check_inner(a: Quantized, b: Quantized) -> None:
    if a.shape[-1] != b.shape[-1] or a.tile.columns != b.tile.columns:
        raise ShapeError(
            f"inner dims {a.shape[-1]} and {b.shape[-1]} in tiles of {a.tile.columns} and "
            f"{b.tile.columns} do not match."
        )


def _product(a: Quantized, b: Quantized, inner: slice) -> Tensor:
    """Return `a @ b.T` over a part of the inner dim. Tiles start as in the whole matrices."""
    size = a.tile.columns
    total = a.scales.new_zeros(a.shape[0], b.shape[0])
    a_scales, b_scales = _by_row(a), _by_row(b)
    # An expert without tokens does not have a tile.
    tiles = range(inner.start // size, -(-inner.stop // size)) if inner.start < inner.stop else ()
    for k in tiles:
        part = slice(max(k * size, inner.start), min((k + 1) * size, inner.stop))
        partial = (a.codes[:, part].double() @ b.codes[:, part].double().t()).float()
        total = _fma(a_scales[:, k, None] * b_scales[None, :, k], partial, total)
    return total


def _by_row(x: Quantized) -> Tensor:
    return x.scales.repeat_interleave(x.tile.rows, dim=0)[: x.shape[0]]


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return `x * y + z` of float32, rounded once."""
    product, addend = x.double() * y.double(), z.double()  # exact: 24 + 24 bits fit in 53
    total = product + addend
    # The exact rounding error of this addition (Knuth's two-sum).
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    # Round to odd: cut off, and set the last bit if a part was lost. Rounding to float32 is then as
    # good as a single rounding: Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008.
    cut = total.view(torch.int64) - (lost * total < 0).long()
    return (cut | (lost != 0).long()).view(torch.float64).float()
