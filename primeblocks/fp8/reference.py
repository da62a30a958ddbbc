"""A block-scaled matrix product to the bit, and the exact product to compare it with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError
from .quantize import Quantized

__all__ = ["ReferenceGemm", "exact_product"]


@dataclass(frozen=True)
class ReferenceGemm:
    """`a @ b.T` of two quantized matrices, on any device.

    Products of codes within one tile of the inner dim are summed exactly (they fit float64) and
    rounded to float32; then, tile after tile, `total = fma(a_scale * b_scale, sum, total)` in
    float32. So the result does not depend on threads, libraries or the order inside a tile.
    Hopper's tensor cores accumulate with fewer bits; engines agree with this to a tolerance, not
    to the bit.
    """

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Float32 `[rows of a, rows of b]`. Local.

        Raises:
            ShapeError: the inner dims or their tiles differ.
        """
        inner = a.shape[1]
        if inner != b.shape[1] or a.tile.columns != b.tile.columns:
            raise ShapeError(
                f"inner dims {inner} and {b.shape[1]} in tiles of {a.tile.columns} and "
                f"{b.tile.columns} do not match"
            )
        size = a.tile.columns
        total = torch.zeros(a.shape[0], b.shape[0], device=a.codes.device)
        a_scales = _by_row(a)
        b_scales = _by_row(b)
        for k, start in enumerate(range(0, inner, size)):
            codes_a = a.codes[:, start : start + size].double()
            codes_b = b.codes[:, start : start + size].double()
            partial = (codes_a @ codes_b.t()).float()
            total = _fma(a_scales[:, k, None] * b_scales[None, :, k], partial, total)
        return total


def exact_product(a: Quantized, b: Quantized) -> Tensor:
    """Dequantize and multiply in float64: what any engine approximates. Local."""
    if not isinstance(a, Quantized) or not isinstance(b, Quantized):
        raise ShapeError(
            f"needs two quantized matrices; got a {type(a).__name__} and a {type(b).__name__}"
        )
    return a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()


def _by_row(x: Quantized) -> Tensor:
    return x.scales.repeat_interleave(x.tile.rows, dim=0)[: x.shape[0]]


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """`x * y + z` of float32, rounded once."""
    product, addend = x.double() * y.double(), z.double()  # exact: 24 + 24 bits fit in 53
    total = product + addend
    # What that addition lost, exactly (Knuth's two-sum).
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    # Rounded to odd (cut off, last bit set where something is lost), so that rounding to float32
    # is as good as the only one: Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008.
    cut = total.view(torch.int64) - (lost * total < 0).long()
    return (cut | (lost != 0).long()).view(torch.float64).float()
