"""Number formats and the tiles that share a scale."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError

__all__ = ["E4M3_MAX", "Tile"]

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
        if self.rows < 1 or self.columns < 1:
            raise UsageError(f"a tile has positive sides; got {self.rows} x {self.columns}")

    @property
    def transposed(self) -> Tile:
        return Tile(self.columns, self.rows)

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """How many tiles cover a matrix, by dim. Pure."""
        return -(-rows // self.rows), -(-columns // self.columns)
