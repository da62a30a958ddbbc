"""Number formats and the tiles that share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from ..errors import UsageError

__all__ = ["E4M3_MAX", "Tile", "check_tile"]

E4M3_MAX = 448.0
"""The largest float8_e4m3fn. Four exponent and three mantissa bits, no infinity."""


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
