"""Products in tiles of one size."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import ShapeError
from .tiles import check, dot, round_to

__all__ = ["grouped_matmul", "matmul"]


@triton.jit(do_not_specialize=["most"])
@no_type_check
def _multiply_tiles(
    left,
    right,
    ends,
    out,
    most,
    inner,
    columns,
    right_group,
    right_row,
    right_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one tile of the result: rows of one group. A group has at most `most` rows."""
    across, down = tl.cdiv(columns, COLUMNS), tl.cdiv(most, ROWS)
    group, program = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    # Eight tiles of rows take turns, so that concurrent programs share columns of `right`.
    turn = program // (8 * across) * 8
    height = tl.minimum(down - turn, 8)
    tile = turn + program % (8 * across) % height
    column = program % (8 * across) // height * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(ends + group - 1, group > 0, other=0).to(tl.int64)
    row = start + tile * ROWS + tl.arange(0, ROWS)
    end = tl.load(ends + group).to(tl.int64)
    if start + tile * ROWS >= end:
        return

    k = tl.arange(0, INNER)
    left += tl.minimum(row, end - 1)[:, None] * inner + k[None, :]
    right += tl.cast(group, tl.int64) * right_group + k.to(tl.int64)[:, None] * right_row
    right += column.to(tl.int64)[None, :] * right_column
    inside = (column < columns)[None, :]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.range(0, inner, INNER, num_stages=STAGES):
        a = tl.load(left + at, (k < inner - at)[None, :], other=0.0)
        b = right + tl.cast(at, tl.int64) * right_row
        b = tl.load(b, (k < inner - at)[:, None] & inside, other=0.0)
        found = dot(a, b, found)
    out += row[:, None] * columns + column[None, :]
    tl.store(out, round_to(found, out.dtype.element_ty), (row < end)[:, None] & inside)


def _launch_of_products(dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of all products in a dtype. Pure."""
    if dtype == torch.float32:
        return {"ROWS": 64, "COLUMNS": 64, "INNER": 16, "STAGES": 2, "num_warps": 8}
    return {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "STAGES": 3, "num_warps": 8}


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `[rows, in]` by `[in, out]`, or `[batch, rows, in]` by `[batch, in, out]`. Local.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit together.
        UnsupportedError: a dtype is not supported, an operand needs gradients, or tensors are on a
            CPU.
    """
    if left.dim() == right.dim() == 2:
        return matmul(left[None], right[None])[0]
    if left.dim() != 3:
        raise ShapeError(f"{list(left.shape)} and {list(right.shape)} do not multiply.")
    batch, rows, _ = left.shape
    ends = torch.arange(1, batch + 1, device=left.device) * rows
    return _multiply(left.flatten(0, 1), right, ends, rows).view(batch, rows, right.shape[-1])


def grouped_matmul(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows of `[rows, in]` by its own matrix of `[groups, in, out]`. Local.

    For each group, `ends` contains the index after the group's last row. These indices must be in
    ascending order. The host does not read `ends`. An end above the number of rows counts as the
    number of rows. Rows of the result after the last group are zero. The function raises the errors
    of `matmul`.
    """
    return _multiply(left, right, ends.clamp(0, len(left)), len(left))


def _multiply(left: Tensor, right: Tensor, ends: Tensor, most: int) -> Tensor:
    check(left, right)
    groups, inner, columns = right.shape if right.dim() == 3 else (-1, 0, 0)
    fits = left.dtype == right.dtype and left.device == right.device == ends.device
    if not fits or left.dim() != 2 or left.shape[1] != inner or ends.shape != (groups,):
        raise ShapeError(
            "needs [rows, in], [groups, in, out] and [groups] of one dtype and device; got "
            f"{list(left.shape)} of {left.dtype} on {left.device}, {list(right.shape)} of "
            f"{right.dtype} on {right.device}, and {list(ends.shape)} on {ends.device}."
        )
    out = left.new_zeros(len(left), columns)  # Zeros for rows after the last end.
    if out.numel():
        launch = _launch_of_products(left.dtype)
        tiles = groups * triton.cdiv(most, launch["ROWS"]) * triton.cdiv(columns, launch["COLUMNS"])
        sizes = (most, inner, columns, *right.stride())
        with torch.cuda.device_of(out):
            _multiply_tiles[(tiles,)](left.contiguous(), right, ends, out, *sizes, **launch)
    return out
