"""Sums that are equal bit for bit, whatever the order in which programs add.

A sum of floats depends on the order of its terms. A sum of integers does not, so contributions are
added as 64-bit integers. The value of one unit is chosen first. No sum can overflow, and the unit
is so far below the largest contribution that sums are more precise than in float32.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

__all__ = ["add_columns", "scale_back", "unit_of"]


@triton.jit
@no_type_check
def unit_of(largest, ROOM: tl.constexpr):
    """Return the exponent of the unit, and whether it exists. It does not after a NaN or infinity.

    The largest contribution is below 2**(bits - 126), and at most 2**ROOM of them are summed.
    """
    bits = tl.load(largest) >> 23
    return bits - 126 + ROOM - 62, bits < 255


@triton.jit
@no_type_check
def _times_power(x, exponent):
    """Multiply by a power of two, which may be outside of float32."""
    half = exponent // 2
    x *= ((half + 127) << 23).to(tl.float32, bitcast=True)
    return x * ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _add(target, column, inside, values, exponent, finite, FIXED: tl.constexpr):
    if FIXED:
        values = tl.where(finite, _times_power(values, -exponent), 0.0).to(tl.int64)
    tl.atomic_add(target + column[None, :], values, inside, sem="relaxed")


@triton.jit
@no_type_check
def add_columns(
    target,
    seen,
    start,
    values,
    exponent,
    finite,
    WIDTH: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Add gradients of rows to those of other programs.

    Integers take twice the registers. Columns are therefore added in quarters of every fourth
    group of eight, as threads hold them.
    """
    columns: tl.constexpr = values.shape[1]
    if FIXED and columns >= 128:
        at = tl.arange(0, columns // 4)
        at = start + at // 8 * 32 + at % 8
        even, odd = _halve(values)
        for half in tl.static_range(2):
            first, second = _halve(even if half == 0 else odd)
            for part in tl.static_range(2):
                column = at + half * 8 + part * 16
                inside = seen[:, None] & (column < WIDTH)[None, :]
                piece = first if part == 0 else second
                _add(target, column, inside, piece, exponent, finite, FIXED)
    else:
        column = start + tl.arange(0, columns)
        inside = seen[:, None] & (column < WIDTH)[None, :]
        _add(target, column, inside, values, exponent, finite, FIXED)


@triton.jit
@no_type_check
def _halve(x):
    """Split columns by groups of eight: the first, third ..., and the second, fourth ...."""
    lines: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1] // 2
    x = tl.reshape(x, (lines, columns // 8, 2, 8))
    first, second = tl.split(tl.permute(x, (0, 1, 3, 2)))
    return tl.reshape(first, (lines, columns)), tl.reshape(second, (lines, columns))


@triton.jit
@no_type_check
def scale_back(sums, largest, out, count, ROOM: tl.constexpr, SIZE: tl.constexpr):
    """Turn sums of integers into numbers. All are NaN if a contribution was NaN or infinite."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    exponent, finite = unit_of(largest, ROOM)
    values = _times_power(tl.load(sums + at, at < count, other=0).to(tl.float32), exponent)
    tl.store(out + at, tl.where(finite, values, float("nan")), at < count)
