"""Quantization on a CPU in one pass, by a function that Numba compiles at the first call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, no_type_check

import numpy as np
import torch
from torch import Tensor

from ...errors import UnsupportedError, needs
from ..quantize import (
    Nonfinite,
    Quantized,
    Quotient,
    Scale,
    Tile,
    check_operands,
    refuse_nonfinite,
)

with needs("numba", extra="numba"):
    import numba

__all__ = ["NumbaQuantizer"]

# With fewer values per thread, one thread is done before the next thread has started.
_VALUES_A_THREAD = 1 << 19

_I, _U, _F = np.int32, np.uint64, np.float32
_QUOTIENTS = {"reciprocal": 0, "division": 1, "amax": 2}


@dataclass(frozen=True)
class NumbaQuantizer:
    """A `Quantizer` for CPU tensors that makes one pass over the matrix.

    The number of threads is at most `torch.get_num_threads()`. The first call in a process also
    compiles the quantizer, which takes about two seconds.
    """

    def __call__(
        self,
        x: Tensor,
        tile: Tile,
        *,
        scale: Scale = "float32",
        quotient: Quotient = "reciprocal",
        nonfinite: Nonfinite = "raise",
    ) -> Quantized:
        """Return the same result as `quantize`. Local.

        Raises:
            UnsupportedError: `x` is not on a CPU.
            ShapeError, UsageError: as for `quantize`.
        """
        check_operands(x, tile, scale, quotient, nonfinite)
        if x.device.type != "cpu":
            raise UnsupportedError(
                f"NumbaQuantizer needs x on the CPU; got x on {x.device}. Use "
                "primeblocks.fp8.adapters.triton.TritonQuantizer()."
            )
        rows, columns = x.shape[-2:]
        down, across = tile.grid(rows, columns)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        grid = *x.shape[:-2], down, across
        scales = torch.empty(grid, dtype=torch.float32, device=x.device)
        if codes.numel():
            bits = _bits_of(x.detach().resolve_neg())
            sides = (rows, columns), (tile.rows, tile.columns)
            _in_threads(
                [one.view(-1).numpy() for one in (bits, codes, scales)],
                (down, across),
                (sides, scale == "ue8m0", _QUOTIENTS[quotient]),
            )
        quantized = Quantized(codes.view(torch.float8_e4m3fn), scales, tile)
        if nonfinite == "raise":
            refuse_nonfinite(x, quantized)
        return quantized


def _bits_of(x: Tensor) -> Tensor:
    """Return the values' bits as integers: the upper half of a float32's bits, or all."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16)
    return x.float().contiguous().view(torch.int32)


def _in_threads(arrays: list[Any], grid: tuple[int, int], how: tuple[Any, ...]) -> None:
    """Assign the row tiles of all matrices to threads. The kernel releases the GIL."""
    codes, scales = arrays[1:]
    tiles = len(scales) // grid[1]
    threads = max(1, min(torch.get_num_threads(), tiles, len(codes) // _VALUES_A_THREAD))
    cuts = [tiles * thread // threads for thread in range(threads + 1)]
    parts = [(*arrays, grid, first, last, *how) for first, last in pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:
        others = [pool.submit(_quantize, *part) for part in parts[1:]]
        _quantize(*parts[0])
        for other in others:
            other.result()


@numba.njit(inline="always")
@no_type_check
def _shift(bits):
    """Return the shift of these bits to their place in a float32, a constant when compiled."""
    return _I(16) if bits.itemsize == 2 else _I(0)


@numba.njit(error_model="numpy", nogil=True)
@no_type_check
def _largest(bits, start, size):
    """Return the bits of the largest magnitude. Without the sign, bits are ordered as floats."""
    top = _I(0)
    for i in range(_U(size)):
        magnitude = _I(_I(_I(bits[_U(start) + i]) << _shift(bits)) & _I(0x7FFFFFFF))
        top = magnitude if magnitude > top else top
    return _I(top)


@no_type_check
def _encoder(divides: bool) -> Callable[..., None]:
    @numba.njit(error_model="numpy", nogil=True)
    @no_type_check
    def encode(bits, start, size, by, codes):
        for i in range(_U(size)):
            x = _I(_I(bits[_U(start) + i]) << _shift(bits)).view(_F)
            scaled = _F(x / by if divides else x * by).view(_I)
            magnitude = _I(scaled & _I(0x7FFFFFFF))
            # Add just under half of the last kept bit, and one more if it is 1 (ties to even).
            odd = _I(_I(magnitude >> _I(20)) & _I(1))
            normal = _I(_I(_I(magnitude + _I(0x7FFFF)) + odd) >> _I(20)) - _I(120 << 3)
            # Below 2**-6 codes are multiples of 2**-9, the last place of floats above 2**14.
            subnormal = _F(magnitude.view(_F) + _F(2**14)).view(_I) - _I(0x46800000)
            code = subnormal if magnitude < _I(121 << 23) else normal
            codes[_U(start) + i] = np.uint8(code | _I((scaled >> _I(24)) & _I(0x80)))

    return encode


_encode_scaled, _encode_divided = _encoder(False), _encoder(True)


@numba.njit(error_model="numpy", nogil=True)
@no_type_check
def _scale_of(top, ue8m0):
    """Return a tile's scale from the bits of its largest magnitude, as `quantize.scales_of`."""
    if top == 0:
        return _F(1)
    if top >= _I(0x7F800000):
        return _F(np.nan)
    scale = _F(_F(_I(top).view(_F) / _F(448)))
    scale = _F(max(scale, _F(2.0**-126)))
    if ue8m0:
        scale = _F(_I(_I(_F(scale).view(_I) + _I(0x7FFFFF)) & _I(~0x7FFFFF)).view(_F))
    return scale


@numba.njit(error_model="numpy", nogil=True)
@no_type_check
def _quantize(bits, codes, scales, shape, first, last, sides, ue8m0, quotient):
    """Quantize the row tiles `first ... last - 1`, counted over all matrices.

    Goes row by row, in the order of memory. Takes flat arrays, because slices would count
    references, and threads would wait for each other.
    """
    (down, across), (rows, columns), (tile_rows, tile_columns) = shape, sides[0], sides[1]
    tops, factors = np.empty(across, _I), np.empty(across, _F)
    for place in range(first, last):
        top_row = place % down * tile_rows
        start = (place // down * rows + top_row) * columns
        stop = start + min(tile_rows, rows - top_row) * columns
        tops[:] = 0
        for row in range(start, stop, columns):
            for tile in range(across):
                left = tile * tile_columns
                width = min(tile_columns, columns - left)
                tops[tile] = max(tops[tile], _largest(bits, row + left, width))
        for tile in range(across):
            top = tops[tile]
            scale = _scale_of(top, ue8m0)
            scales[place * across + tile] = scale
            factors[tile] = scale if quotient == 1 else _F(1) / scale
            if quotient == 2 and not ue8m0 and top > 0 and not np.isnan(scale):
                factors[tile] = min(_F(_F(448) / _I(top).view(_F)), _F(2.0**126))
        for row in range(start, stop, columns):
            for tile in range(across):
                left, by = row + tile * tile_columns, factors[tile]
                width = min(tile_columns, columns - tile * tile_columns)
                if np.isnan(by):
                    codes[left : left + width] = 0x7F
                elif quotient == 1:
                    _encode_divided(bits, left, width, by, codes)
                else:
                    _encode_scaled(bits, left, width, by, codes)
