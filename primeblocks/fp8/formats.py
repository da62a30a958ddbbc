"""Number formats, and the tiles that share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import UnsupportedError, UsageError

__all__ = [
    "E4M3_MAX",
    "Nonfinite",
    "Quotient",
    "Scale",
    "Tile",
    "check_choice",
    "check_tile",
    "scales_of",
    "tiled",
]

E4M3_MAX = 448.0
"""The largest float8_e4m3fn. Four exponent and three mantissa bits, no infinity."""

Scale = Literal["float32", "ue8m0"]
"""The kind of a tile's scale: any float32, or powers of two, rounded up (RCEIL)."""

Quotient = Literal["reciprocal", "division", "amax"]
"""The form of a scaled value: `x * (1 / scale)`, `x / scale` or `x * (448 / amax)`."""

Nonfinite = Literal["raise", "nan"]
"""The answer to a value that is not finite: an error, or a tile whose scale and codes are NaN."""


@dataclass(frozen=True)
class Tile:
    """The part of a matrix that shares one scale; ragged at the last row and column.

    Raises:
        UsageError: a side is not positive.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        for side in (self.rows, self.columns):
            if not isinstance(side, Integral) or side < 1:
                raise UsageError(f"a tile has positive sides; got {self.rows!r} x {self.columns!r}")

    @property
    def transposed(self) -> Tile:
        return Tile(self.columns, self.rows)

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the numbers of tiles that cover a matrix, by dim. Pure."""
        return -(-rows // self.rows), -(-columns // self.columns)


def check_tile(name: str, value: object) -> None:
    """Refuse what is no tile, such as a pair of numbers. Local.

    Raises:
        UsageError: by name.
    """
    if not isinstance(value, Tile):
        raise UsageError(f"{name} must be a Tile, such as Tile(1, 128); got {value!r:.60}")


def check_choice(name: str, value: object, kind: object) -> None:
    """Refuse what is not one of a Literal's words. Local.

    Raises:
        UnsupportedError: with the words that are.
    """
    words = get_args(kind)
    if value not in words:
        raise UnsupportedError(f"{name} is one of {', '.join(map(repr, words))}; got {value!r}")


def scales_of(amax: Tensor, scale: Scale, quotient: Quotient) -> tuple[Tensor, Tensor]:
    """Return the scales of tiles with these largest values, and what the values are scaled by.

    The second is a divisor for `"division"`, a factor otherwise. A scale is at least the smallest
    normal float32, whose reciprocal is finite; 1 where `amax` is 0, NaN where it is not finite.
    Local; the host waits for nothing.
    """
    # As tensors, to be divided: over a number CUDA multiplies by its reciprocal, and a number over
    # a tensor is that number times the tensor's reciprocal everywhere.
    largest = torch.full_like(amax, E4M3_MAX)
    scales = (amax / largest).clamp_(min=torch.finfo(torch.float32).tiny)
    if scale == "ue8m0":
        # One more in the exponent where a mantissa bit is set: exp2(ceil(log2(s))) goes wrong
        # beside powers of two.
        bits = (scales.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF
        scales = bits.view(torch.float32)
    scales.masked_fill_(amax == 0, 1.0)
    scales.masked_fill_(~amax.isfinite(), torch.nan)
    if quotient == "division":
        return scales, scales
    if quotient == "amax" and scale == "float32":
        factor = (largest / amax).clamp_(max=1 / torch.finfo(torch.float32).tiny)
        factor.masked_fill_(amax == 0, 1.0)
        return scales, factor.masked_fill_(scales.isnan(), torch.nan)
    return scales, scales.reciprocal()


def tiled(x: Tensor, tile: Tile) -> Tensor:
    """View `[..., rows, columns]` as `[..., row tiles, rows, column tiles, columns]`.

    Filled up with zeros, which copies, where the last tiles are ragged. Local.
    """
    down, across = tile.grid(*x.shape[-2:])
    padding = (0, across * tile.columns - x.shape[-1], 0, down * tile.rows - x.shape[-2])
    whole = torch.nn.functional.pad(x, padding) if any(padding) else x
    return whole.unflatten(-1, (across, tile.columns)).unflatten(-3, (down, tile.rows))
