"""Block-scaled products of float8 matrices: dense, grouped, and over tokens.

One kernel computes all three. A program owns a block of the result. It multiplies one tile of the
inner dim at a time on the tensor cores, and adds the product in float32 as
`total = fma(a_scale * b_scale, partial, total)`. Partial sums have the tensor core's precision,
which on Hopper is below float32's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import ShapeError, UnsupportedError
from ...quantize import Quantized, check_choice
from .quantize import check_device

__all__ = ["TritonGemm"]

Dtype = Literal["float32", "bfloat16"]

# Rows of a block of the result, and columns of each of its parts. Two parts share rows of a, so a
# block of 128 x 256 reads a quarter less than two blocks of 128 x 128. All shapes use these sizes,
# so kernels are not tuned at run time, and results do not depend on tuning.
BLOCK = 128
STAGES = 3
# Concurrent programs take this many blocks of rows in turn, so that they share blocks of b.
_TURN = 8
_INNER = (32, 64, 128)


@triton.jit
@no_type_check
def _find_group(block, offsets, groups, rows, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return group, first row and end of a block. Rows after the last offset are one more group."""
    index = tl.arange(0, GROUPS)  # GROUPS > groups
    ends = tl.load(offsets + index, index < groups, other=rows).to(tl.int32)
    starts = tl.load(offsets + index - 1, (index > 0) & (index <= groups), other=rows).to(tl.int32)
    # The host did not check offsets, because it does not read them. Stay in bounds.
    ends = tl.minimum(ends, rows)
    starts = tl.where(index == 0, 0, tl.minimum(starts, rows))
    blocks = tl.cdiv(ends - starts, BLOCK)
    after = tl.cumsum(blocks, 0)
    group = tl.sum((after <= block).to(tl.int32), 0)
    here = index == group
    first = tl.sum(tl.where(here, starts + (block - after + blocks) * BLOCK, 0), 0)
    return group, first, tl.sum(tl.where(here, ends, 0), 0)


@triton.jit
@no_type_check
def _find_tokens(group, offsets, tokens):
    """Return the first token and the end of a group, or 0 and 0 for an empty group."""
    begin = tl.load(offsets + group - 1, group > 0, other=0).to(tl.int32)
    end = tl.minimum(tl.load(offsets + group).to(tl.int32), tokens)
    return tl.where(begin < end, begin, 0), tl.where(begin < end, end, 0)


@triton.jit
@no_type_check
def _add_part(
    total,
    a,
    a_scale,
    b,
    b_scales,
    inside_k,
    inside_b,
    own,
    PARTIAL: tl.constexpr,
    B_ROWS: tl.constexpr,
):
    """Add the product of one tile of the inner dim. a has codes, and b has addresses of codes."""
    b_scale = tl.load(b_scales, inside_b, other=0.0)
    codes = tl.load(b, inside_k[:, None], other=0.0)
    if PARTIAL:  # Mask by `own` after the load, which would otherwise read byte by byte.
        codes = tl.where(own[:, None], codes.to(tl.uint8, bitcast=True), 0)
        codes = codes.to(tl.float8e4nv, bitcast=True)
    if B_ROWS == 1:
        scale = a_scale[:, None] * b_scale[None, :]
    else:
        scale = tl.broadcast_to((a_scale * b_scale)[:, None], total.shape)
    partial = tl.dot(a, codes, out_dtype=tl.float32)
    return tl.fma(partial, scale, total)


@triton.jit
@no_type_check
def _add_tiles(
    total0,
    total1,
    of_a,
    of_b0,
    of_b1,
    span,
    tile,
    stop,
    PARTIAL: tl.constexpr,
    B_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the tiles `tile ... stop - 1`. If PARTIAL, add only their part inside the span."""
    a, a_scales, a_scale_tile, inside_a = of_a
    b0, b0_scales, b_scale_tile, inside_b0 = of_b0
    b1, b1_scales, b_scale_tile, inside_b1 = of_b1
    begin, end, inner = span
    for i in tl.range(tile, stop, num_stages=STAGES):
        start = i * TILE
        k = start + tl.arange(0, TILE)
        inside_k, own = k < inner, (k >= begin) & (k < end)
        a_scale = tl.load(a_scales + tl.cast(i, tl.int64) * a_scale_tile, inside_a, other=0.0)
        codes = tl.load(a + start, inside_k[None, :], other=0.0)
        scales = b0_scales + tl.cast(i, tl.int64) * b_scale_tile
        total0 = _add_part(
            total0, codes, a_scale, b0 + start, scales, inside_k, inside_b0, own, PARTIAL, B_ROWS
        )
        if PARTS == 2:
            scales = b1_scales + tl.cast(i, tl.int64) * b_scale_tile
            total1 = _add_part(
                total1,
                codes,
                a_scale,
                b1 + start,
                scales,
                inside_k,
                inside_b1,
                own,
                PARTIAL,
                B_ROWS,
            )
    return total0, total1


@triton.jit
@no_type_check
def _places_of(
    x,
    scales,
    first,
    end,
    row_stride,
    scale_row,
    scale_tile,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Return addresses of a block's rows and scales: BLOCK scales if ROWS is 1, or one scale."""
    row = first + tl.arange(0, BLOCK)
    # Use the last row in place of rows out of bounds, so that loads of codes need no row mask.
    near = tl.minimum(row, end - 1).to(tl.int64)
    k = tl.arange(0, TILE)
    x += tl.expand_dims(near, DIM) * row_stride + tl.expand_dims(k, 1 - DIM)
    if ROWS == 1:
        scales += row.to(tl.int64) * scale_row
        inside = row < end
    else:
        scales += tl.cast(first // ROWS, tl.int64) * scale_row
        inside = first < end
    return x, scales, scale_tile, inside


@triton.jit
@no_type_check
def _multiply_blocks(
    a,
    b,
    out,
    a_scales,
    b_scales,
    offsets,
    groups,
    rows,
    inner,
    columns,
    a_row,
    a_scale_row,
    a_scale_tile,
    b_group,
    b_row,
    b_scale_group,
    b_scale_row,
    b_scale_tile,
    MODE: tl.constexpr,
    B_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TURN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a block of the result.

    MODE "dense": out = a @ b.T. "rows": each group of rows of a times its own b[group].T. "tokens":
    out[group] = a @ b.T over the group's part of the inner dim.
    """
    across = tl.cdiv(columns, PARTS * BLOCK)
    program = tl.program_id(0)
    down = tl.num_programs(0) // across
    if MODE == "tokens":
        down = tl.cdiv(rows, BLOCK)
    group = program // (down * across)
    program = program % (down * across)
    turn = program // (TURN * across) * TURN
    height = tl.minimum(down - turn, TURN)
    first = (turn + program % (TURN * across) % height) * BLOCK
    left = program % (TURN * across) // height * (PARTS * BLOCK)

    end, begin, limit = rows, 0, inner
    if MODE == "rows":
        group, first, end = _find_group(first // BLOCK, offsets, groups, rows, GROUPS, BLOCK)
        if group > groups:
            return
        limit = tl.where(group < groups, inner, 0)  # Rows past the last offset are zero.
        b += group.to(tl.int64) * b_group
        b_scales += group.to(tl.int64) * b_scale_group
    if MODE == "tokens":
        begin, limit = _find_tokens(group, offsets, inner)
        out += group.to(tl.int64) * rows * columns

    of_a = _places_of(a, a_scales, first, end, a_row, a_scale_row, a_scale_tile, 1, BLOCK, TILE, 1)
    of_b0 = _places_of(
        b, b_scales, left, columns, b_row, b_scale_row, b_scale_tile, B_ROWS, BLOCK, TILE, 0
    )
    of_b1 = of_b0
    if PARTS == 2:
        right = left + BLOCK
        of_b1 = _places_of(
            b, b_scales, right, columns, b_row, b_scale_row, b_scale_tile, B_ROWS, BLOCK, TILE, 0
        )
    total0 = tl.zeros((BLOCK, BLOCK), tl.float32)
    total1 = total0
    span = (begin, limit, inner)
    # Add whole tiles. For "tokens", also add shared tiles at both ends of the group's tokens.
    whole = tl.cdiv(begin, TILE)
    stop = tl.cdiv(limit, TILE)
    last = stop
    if MODE == "tokens":
        tile, head = begin // TILE, tl.minimum(whole, stop)
        total0, total1 = _add_tiles(
            total0, total1, of_a, of_b0, of_b1, span, tile, head, True, B_ROWS, TILE, PARTS, 1
        )
        last = tl.maximum(whole, limit // TILE)
    total0, total1 = _add_tiles(
        total0, total1, of_a, of_b0, of_b1, span, whole, last, False, B_ROWS, TILE, PARTS, STAGES
    )
    if MODE == "tokens":
        total0, total1 = _add_tiles(
            total0, total1, of_a, of_b0, of_b1, span, last, stop, True, B_ROWS, TILE, PARTS, 1
        )

    row = first + tl.arange(0, BLOCK)
    column = left + tl.arange(0, BLOCK)
    out += row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < end)[:, None]
    tl.store(out, total0, inside & (column < columns)[None, :])
    if PARTS == 2:
        tl.store(out + BLOCK, total1, inside & (column + BLOCK < columns)[None, :])


@dataclass(frozen=True)
class TritonGemm:
    """A `Gemm` in Triton that launches one kernel per call. The host does not read offsets.

    Tiles of `a` have one row, and tiles of `b` have one or 128 rows. The tiles of `a` and `b` have
    the same number of columns: 32, 64 or 128. If the inner dim is a multiple of 16, the kernel
    reads 16 codes at a time, and otherwise one code at a time.

    Args:
        dtype: the dtype of results. `k_grouped` always returns float32.

    Raises:
        UnsupportedError: `dtype` is not supported.
    """

    dtype: Dtype = "bfloat16"
    k_major: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, Dtype)

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply `a @ b.T`. Local.

        Raises:
            ShapeError: shapes or tiles do not match.
            UnsupportedError: the kernel does not support the tiles, or tensors are on a CPU.
        """
        _check(a, b, None, ndim=2)
        out = a.codes.new_empty(a.shape[0], b.shape[0], dtype=getattr(torch, self.dtype))
        _launch(a, b, out, None, "dense", triton.cdiv(a.shape[0], BLOCK))
        return out

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Multiply each expert's rows of `a` by `b[expert].T`.

        Local. Raises the errors of `__call__`. The number of programs is enough for any `offsets`,
        and programs without rows end immediately. Rows of the result after the last offset are
        zero.
        """
        _check(a, b, offsets, ndim=3)
        out = a.codes.new_empty(a.shape[0], b.shape[1], dtype=getattr(torch, self.dtype))
        # Each group, and the rows after the last one, have at most one block that is not full.
        _launch(a, b, out, offsets, "rows", a.shape[0] // BLOCK + len(offsets) + 1)
        return out

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Compute `a @ b.T` over each expert's tokens. Local. Raises the errors of `__call__`.

        A tile with tokens of several experts is multiplied once per expert, and the tokens of other
        experts are masked. A product with a mask takes longer than a product without a mask. The
        result of an expert without tokens is zero.
        """
        _check(a, b, offsets, ndim=2)
        out = a.codes.new_empty(len(offsets), a.shape[0], b.shape[0], dtype=torch.float32)
        _launch(a, b, out, offsets, "tokens", len(offsets) * triton.cdiv(a.shape[0], BLOCK))
        return out


def _check(a: Quantized, b: Quantized, offsets: Tensor | None, *, ndim: int) -> None:
    check_device(a.codes, b.codes)
    if len(a.shape) != 2 or len(b.shape) != ndim or a.shape[-1] != b.shape[-1]:
        raise ShapeError(f"{list(a.shape)} and {list(b.shape)} do not multiply.")
    if offsets is not None and (offsets.ndim != 1 or offsets.device != a.codes.device):
        raise ShapeError(f"offsets must be a vector on {a.codes.device}; got {offsets!r:.60}.")
    if offsets is not None and ndim == 3 and len(offsets) != len(b.codes):
        raise ShapeError(f"{len(b.codes)} experts need as many offsets; got {len(offsets)}.")
    if a.tile.columns != b.tile.columns:
        raise ShapeError(f"tiles {a.tile} and {b.tile} differ along the inner dim.")
    if a.tile.rows != 1 or b.tile.rows not in (1, BLOCK) or a.tile.columns not in _INNER:
        raise UnsupportedError(
            "the kernel multiplies tiles of 1 x 128 by 1 x 128 or 128 x 128, or all with 32 or 64 "
            f"columns; got {a.tile} and {b.tile}. Use ReferenceGemm()."
        )


def _launch(
    a: Quantized, b: Quantized, out: Tensor, offsets: Tensor | None, mode: str, blocks: int
) -> None:
    # Tensor cores read both operands along the inner dim. Another layout is copied here.
    codes_a, codes_b = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.codes, b.codes))
    # If each row of b has its own scales, two parts would need more registers than a program has.
    parts = 2 if out.shape[-1] > BLOCK and b.tile.rows > 1 else 1
    groups = 0 if offsets is None else len(offsets)
    grid = blocks * triton.cdiv(out.shape[-1], parts * BLOCK)
    if not out.numel():
        return
    with torch.cuda.device_of(out):
        _multiply_blocks[(grid,)](
            codes_a,
            codes_b,
            out,
            a.scales,
            b.scales,
            out if offsets is None else offsets.contiguous(),
            groups,
            *a.shape,
            out.shape[-1],
            codes_a.stride(0),
            *a.scales.stride(),
            codes_b.stride(0),
            codes_b.stride(-2),
            b.scales.stride(0),
            *b.scales.stride()[-2:],
            MODE=mode,
            B_ROWS=b.tile.rows,
            TILE=a.tile.columns,
            GROUPS=triton.next_power_of_2(groups + 1),
            BLOCK=BLOCK,
            PARTS=parts,
            TURN=_TURN,
            STAGES=STAGES,
            num_warps=8,
            enable_fp_fusion=False,  # The kernel calls fma itself.
        )
