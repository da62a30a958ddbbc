"""Quantize in tiles, in one pass over the input.

Codes and scales equal those of `primeblocks.fp8.quantize` bit for bit. Divisions are rounded
correctly. A tile's maximum is computed from bits without sign, where a NaN is larger than all
numbers. Values are not flushed to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import ShapeError, UnsupportedError
from ....groups import check_tensors
from ...quantize import (
    Nonfinite,
    Quantized,
    Quotient,
    Scale,
    Tile,
    check_operands,
    refuse_nonfinite,
)

__all__ = ["TritonQuantizer", "check_device"]

# Triton itself also decides this at import.
INTERPRETED = bool(triton.knobs.runtime.interpret)
_SIDE = 128


@triton.jit
@no_type_check  # The compiler reads the source, so a check of types cannot wrap the function.
def _round_to_e4m3(x, INTEGERS: tl.constexpr):
    """Return bytes of the nearest E4M3 numbers, ties to even: at most 448, and 0x7f for NaN."""
    if INTEGERS:  # The interpreter's own cast is wrong in 2 % of codes.
        bits = x.to(tl.int32, bitcast=True)
        size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
        number = (bits & 0x7FFFFFFF) <= 0x7F800000
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 codes have the step 2**-9, which is float32's step at 2**14.
        shifted = size.to(tl.float32, bitcast=True) + 16384.0
        code = tl.where(size < (121 << 23), shifted.to(tl.int32, bitcast=True) - 0x46800000, normal)
        code = tl.where(number, code | ((bits >> 24) & 0x80), 0x7F)
        return code.to(tl.uint8)
    # Four codes per register. Triton's own cast makes pairs of codes, and ptxas 12.8 and 12.9 lose
    # bytes if a transposed store takes these pairs apart (triton#11111).
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f",
        [x],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
@no_type_check
def _round_to(x, DTYPE: tl.constexpr, INTEGERS: tl.constexpr):
    """Return float32 values rounded to the nearest value of DTYPE, ties to even."""
    if INTEGERS and tl.bfloat16 == DTYPE:  # The interpreter truncates.
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        number = (bits & 0x7FFFFFFF) <= 0x7F800000
        return tl.where(number, near.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
@no_type_check
def _round_tiles(
    x,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    POWERS: tl.constexpr,
    QUOTIENT: tl.constexpr,
    INTEGERS: tl.constexpr,
):
    """Return codes `[rows, columns]` and scales `[rows / HEIGHT, columns / WIDTH]` of a block."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    down: tl.constexpr = rows // HEIGHT
    across: tl.constexpr = columns // WIDTH
    values = tl.reshape(x, (down, HEIGHT, across, WIDTH))
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(bits, 3), 1)
    amax = largest.to(tl.float32, bitcast=True)
    # 2**-126, because the reciprocal of a subnormal scale would be infinite.
    scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    scale = tl.where(largest == 0, 1.0, scale)
    if POWERS:
        up = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = up.to(tl.float32, bitcast=True)
    scale = tl.where(largest < 0x7F800000, scale, float("nan"))
    spread = tl.reshape(scale, (down, 1, across, 1))
    if QUOTIENT == "division":
        values = tl.div_rn(values, tl.broadcast_to(spread, values.shape))
    elif QUOTIENT == "amax" and not POWERS:
        # At most 2**126, the reciprocal of the smallest scale.
        factor = tl.div_rn(448.0, tl.maximum(amax, 448.0 * 1.1754943508222875e-38))
        factor = tl.where(largest < 0x7F800000, factor, float("nan"))
        values = values * tl.reshape(factor, (down, 1, across, 1))
    else:
        values = values * tl.div_rn(1.0, spread)
    codes = _round_to_e4m3(values, INTEGERS)
    return tl.reshape(codes, (rows, columns)), scale


@triton.jit
@no_type_check
def _store_tiles(block, scale, codes, scales, batch, top, left, rows, columns):
    """Store a block that begins at (top, left) of a matrix, and its scales."""
    row = top.to(tl.int64) + tl.arange(0, block.shape[0])[:, None]
    column = left + tl.arange(0, block.shape[1])[None, :]
    place = (batch * rows + row) * columns + column
    tl.store(codes + place, block, (row < rows) & (column < columns))
    height: tl.constexpr = block.shape[0] // scale.shape[0]
    width: tl.constexpr = block.shape[1] // scale.shape[1]
    down, across = tl.cdiv(rows, height), tl.cdiv(columns, width)
    row = (top // height).to(tl.int64) + tl.arange(0, scale.shape[0])[:, None]
    column = (left // width).to(tl.int64) + tl.arange(0, scale.shape[1])[None, :]
    if height == 1:  # Products read them by columns, so rows are contiguous.
        place = (batch * across + column) * down + row
    else:
        place = (batch * down + row) * across + column
    tl.store(scales + place, scale, (row < down) & (column < across))


@triton.jit
@no_type_check
def _quantize_blocks(
    x,
    scores,
    codes,
    scales,
    flipped_codes,
    flipped_scales,
    rows,
    columns,
    x_batch,
    x_row,
    x_column,
    GATED: tl.constexpr,
    SCORED: tl.constexpr,
    BOTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    POWERS: tl.constexpr,
    QUOTIENT: tl.constexpr,
    INTEGERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize a block of x `[batch, rows, columns]` and, with BOTH, of x.mT, each in own tiles.

    With GATED, quantize the SwiGLU of x `[batch, rows, 2 * columns]`. With SCORED, multiply by one
    score per row.
    """
    across, down = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    left = program % across * COLUMNS
    top = program // across % down * ROWS
    batch = (program // (across * down)).to(tl.int64)
    row = top.to(tl.int64) + tl.arange(0, ROWS)[:, None]
    column = left.to(tl.int64) + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    x += batch * x_batch + row * x_row + column * x_column
    values = tl.load(x, inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + columns * x_column, inside, other=0.0).to(tl.float32)
        values = values / (1.0 + tl.exp(-values)) * up
    if SCORED:
        values = values * tl.load(scores + row, row < rows, other=0.0).to(tl.float32)
    values = _round_to(values, x.dtype.element_ty, INTEGERS)
    block, scale = _round_tiles(values, HEIGHT, WIDTH, POWERS, QUOTIENT, INTEGERS)
    _store_tiles(block, scale, codes, scales, batch, top, left, rows, columns)
    if BOTH:
        if HEIGHT != WIDTH:  # With square tiles, codes are the same.
            block, scale = _round_tiles(values, WIDTH, HEIGHT, POWERS, QUOTIENT, INTEGERS)
        block, scale = tl.trans(block), tl.trans(scale)
        _store_tiles(block, scale, flipped_codes, flipped_scales, batch, left, top, columns, rows)


@dataclass(frozen=True)
class TritonQuantizer:
    """A `FusedQuantizer` in Triton that returns the same bits as `fp8.quantize`.

    `how` stands for the keywords `scale`, `quotient` and `nonfinite` of `fp8.quantize`. Each call
    quantizes in one kernel. With `nonfinite="raise"`, the check of the scales needs more kernels.
    If tiles have one row, scales of neighbouring rows are adjacent in memory, because products read
    scales in this order. The sides of tiles must be powers of two up to 128.
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
        """Quantize x `[*batch, rows, columns]`, with any strides. Local.

        With `nonfinite="raise"` the host waits for the device.

        Raises:
            UsageError: a value is not finite.
            UnsupportedError: Triton cannot use `x`, or the kernel does not support `tile`.
            ShapeError: `x` is not a matrix of floating-point numbers.
        """
        return _quantize(x, tile, scale=scale, quotient=quotient, nonfinite=nonfinite)[0]

    def both(self, x: Tensor, tile: Tile, **how: Any) -> tuple[Quantized, Quantized]:
        """Quantize `x` and `x.mT`, both in tiles of size `tile`, and read `x` only once. Local.

        The codes of `x` and of `x.mT` are contiguous. In `x` and in `x.mT`, the first tile starts
        at the first row and the first column. Raises the errors of `__call__`.
        """
        made, flipped = _quantize(x, tile, both=True, **how)
        return made, flipped

    def swiglu(self, gate_up: Tensor, scores: Tensor | None, tile: Tile, **how: Any) -> Quantized:
        """Quantize the SwiGLU of `gate_up` without storing the activation. Local.

        The kernel moves 5 bytes per bfloat16 activation. Separate kernels for SwiGLU and
        quantization would move 9 bytes per activation. Because the kernel uses the GPU's
        exponential, an activation may have a relative error of up to (5 + |gate|) * 2**-23 before
        rounding. The codes equal the result of `fp8.quantize` for the rounded activation.

        Raises:
            ShapeError: `gate_up` is not `[tokens, 2 * inner]` with a floating-point dtype, or
                `scores` is not `[tokens]` on the same device.
            UnsupportedError, UsageError: as for `__call__`.
        """
        _check_gated(gate_up, scores)
        return _quantize(gate_up, tile, gated=True, scores=scores, **how)[0]

    def swiglu_both(
        self, gate_up: Tensor, scores: Tensor | None, tile: Tile, **how: Any
    ) -> tuple[Quantized, Quantized]:
        """Quantize the SwiGLU of `gate_up`, and the transpose of the SwiGLU. Local.

        The kernel moves 6 bytes per bfloat16 activation. Separate kernels for SwiGLU and
        quantization would move 10 bytes per activation.
        """
        _check_gated(gate_up, scores)
        made, flipped = _quantize(gate_up, tile, both=True, gated=True, scores=scores, **how)
        return made, flipped


def _quantize(
    x: Tensor,
    tile: Tile,
    *,
    scale: Scale = "float32",
    quotient: Quotient = "reciprocal",
    nonfinite: Nonfinite = "raise",
    both: bool = False,
    gated: bool = False,
    scores: Tensor | None = None,
) -> list[Quantized]:
    """Run the kernel for one result, or with `both` also for the transpose.

    With `gated`, x is `[..., rows, 2 * columns]`, and its SwiGLU is quantized.
    """
    check_operands(x, tile, scale, quotient, nonfinite)
    _check(x, tile)
    x = x.detach()
    *batch, rows, columns = x.shape
    columns //= 2 if gated else 1
    shapes = [(*batch, rows, columns), (*batch, columns, rows)]
    made = [_empty(x, shape, tile) for shape in shapes[: 1 + both]]
    flat = x.flatten(0, -3) if x.ndim > 3 else x
    # With a transpose, blocks need whole tiles in both directions. Otherwise the height gives 64
    # values to each thread, because 8 loads are then pending.
    height = _SIDE if both or tile.rows > 64 else max(tile.rows, 32 if gated else 64)
    blocks = math.prod(batch) * triton.cdiv(rows, height) * triton.cdiv(columns, _SIDE)
    if blocks:
        with torch.cuda.device_of(x):
            _quantize_blocks[(blocks,)](
                flat,
                x if scores is None else scores.detach().contiguous(),
                made[0].codes.view(torch.uint8),
                made[0].scales,
                made[-1].codes.view(torch.uint8),
                made[-1].scales,
                rows,
                columns,
                flat.stride(-3) if batch else 0,
                flat.stride(-2),
                flat.stride(-1),
                GATED=gated,
                SCORED=scores is not None,
                BOTH=both,
                HEIGHT=tile.rows,
                WIDTH=tile.columns,
                POWERS=scale == "ue8m0",
                QUOTIENT=quotient,
                INTEGERS=INTERPRETED,
                ROWS=height,
                COLUMNS=_SIDE,
                num_warps=8 if height == _SIDE else 4,
                enable_fp_fusion=False,
            )
    if nonfinite == "raise":
        refuse_nonfinite(x, made[0])
    return made


def check_device(*tensors: Tensor) -> None:
    """Refuse tensors that Triton cannot use. Local.

    Raises:
        UnsupportedError: a tensor is on a CPU, outside of Triton's interpreter.
    """
    for x in tensors:
        if not (x.is_cuda or INTERPRETED):
            raise UnsupportedError(
                f"Triton runs on CUDA tensors; got one on {x.device}. Move it, or use "
                "quantize and ReferenceGemm(). To test small sizes, set TRITON_INTERPRET=1 "
                "before the import."
            )


def _check_gated(gate_up: Tensor, scores: Tensor | None) -> None:
    check_tensors(gate_up=gate_up)
    fits = scores is None or (scores.shape, scores.device) == (gate_up.shape[:1], gate_up.device)
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or not fits:
        raise ShapeError(
            "gate_up must be [tokens, 2 * inner], and scores [tokens] on the same device; got "
            f"{list(gate_up.shape)} and {None if scores is None else list(scores.shape)}."
        )


def _check(x: Tensor, tile: Tile) -> None:
    for side in (tile.rows, tile.columns):
        if side & (side - 1) or side > _SIDE:
            raise UnsupportedError(
                f"the kernel has tiles with sides of 1, 2, 4 ... {_SIDE}; got {tile}. Use quantize."
            )
    check_device(x)


def _empty(like: Tensor, shape: tuple[int, ...], tile: Tile) -> Quantized:
    *batch, rows, columns = shape
    down, across = tile.grid(rows, columns)
    codes = like.new_empty(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    if tile.rows > 1:
        scales = like.new_empty((*batch, down, across), dtype=torch.float32)
    else:
        scales = like.new_empty((*batch, across, down), dtype=torch.float32).mT
    return Quantized(codes, scales, tile)
