"""Never run on a GPU: Triton kernels in which a row has the same bits in any batch.

They run in Triton's interpreter, and compile for sm_90 and sm_100. `batch_invariant()` does not use
them. They compute in float32, round once, and have no gradients. The host does not wait for them.
The order of additions depends only on the dtype and on the number of added elements:

- Products have tiles of one size, without split-K and without tuning. A program adds the tiles of
  the inner dim from first to last.
- Sums over a row add neighbours, then neighbouring sums, and so on, as `batch_invariant()` does on
  a CPU. The kernel states each addition itself, because the order of Triton's own sums depends on
  which elements a thread has. It therefore depends on the alignment of a row's address.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
from torch import Tensor

from ...errors import MissingPackageError, ShapeError, UnsupportedError

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise MissingPackageError("triton", "triton") from error

__all__ = ["grouped_matmul", "log_softmax", "matmul", "mean", "rms_norm", "softmax", "total"]

# Decided at import, as Triton itself does.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
_EMULATED = tl.constexpr(_INTERPRETED)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
@no_type_check
def _round_to(x, DTYPE: tl.constexpr):
    """Round float32 to DTYPE, ties to even."""
    if _EMULATED and tl.bfloat16 == DTYPE:  # The interpreter truncates.
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        number = (bits & 0x7FFFFFFF) <= 0x7F800000
        x = tl.where(number, near.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


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
        if _EMULATED:  # The interpreter takes the bits of bfloat16 for integers.
            a, b = a.to(tl.float32), b.to(tl.float32)
        found = tl.dot(a, b, found, input_precision="ieee")
    out += row[:, None] * columns + column[None, :]
    tl.store(out, _round_to(found, out.dtype.element_ty), (row < end)[:, None] & inside)


@triton.jit
@no_type_check
def _add_neighbours(values):
    """Add 2^n values: neighbours, then neighbouring sums, and so on."""
    if values.shape[0] == 1:
        return tl.sum(values, 0)  # This turns one value into a scalar.
    else:
        even, odd = tl.split(tl.reshape(values, (values.shape[0] // 2, 2)))
        return _add_neighbours(even + odd)


@triton.jit
@no_type_check
def _read(values, start, width, PAD: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.load(values + at, at < width, other=PAD).to(tl.float32)


@triton.jit
@no_type_check
def _compute_row(
    values,
    weight,
    out,
    width,
    divisor,
    eps,
    KIND: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Compute the function KIND of one row. The PAD after the row changes no sum."""
    row = tl.program_id(0).to(tl.int64)
    values += row * width
    greatest = 0.0
    if PAD < 0:  # -inf, for a softmax
        maxima = tl.full((BLOCK,), PAD, tl.float32)
        for start in range(0, width, BLOCK):
            maxima = tl.maximum(maxima, _read(values, start, width, PAD, BLOCK))
        greatest = tl.max(maxima, 0)
        greatest = tl.where(greatest == PAD, 0.0, greatest)
    sums = tl.zeros((TILES,), tl.float32)
    for start in range(0, width, BLOCK):
        x = _read(values, start, width, PAD, BLOCK)
        if KIND == "rms_norm":
            x = x * x
        if PAD < 0:
            x = tl.exp(x - greatest)
        sums = tl.where(tl.arange(0, TILES) == start // BLOCK, _add_neighbours(x), sums)
    found = tl.div_rn(_add_neighbours(sums), divisor)
    if KIND == "total":
        tl.store(out + row, _round_to(found, out.dtype.element_ty))
        return
    out += row * width
    if KIND == "rms_norm":
        found = tl.div_rn(1.0, tl.sqrt_rn(found + eps))
    for start in range(0, width, BLOCK):
        x = _read(values, start, width, PAD, BLOCK)
        if KIND == "rms_norm":
            x = x * found * _read(weight, start, width, 0.0, BLOCK)
        if KIND == "softmax":
            x = tl.div_rn(tl.exp(x - greatest), found)
        if KIND == "log_softmax":
            x = x - greatest - tl.log(found)
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, _round_to(x, out.dtype.element_ty), at < width)


def _launch_of_products(dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of all products in a dtype. Pure."""
    if dtype == torch.float32:
        return {"ROWS": 64, "COLUMNS": 64, "INNER": 16, "STAGES": 2, "num_warps": 8}
    return {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "STAGES": 3, "num_warps": 8}


def _launch_of_rows(kind: str, width: int) -> dict[str, Any]:
    """Return how a program reads a row. Fusion is off, because it omits a rounding. Pure."""
    block = min(triton.next_power_of_2(max(width, 1)), 1024)
    tiles = triton.next_power_of_2(max(triton.cdiv(width, block), 1))
    names = {"KIND": kind, "PAD": -math.inf if kind.endswith("softmax") else 0.0}
    return names | {"BLOCK": block, "TILES": tiles, "num_warps": 4, "enable_fp_fusion": False}


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `[rows, in]` by `[in, out]`, or `[batch, rows, in]` by `[batch, in, out]`. Local.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit together.
        UnsupportedError: another dtype, gradients, or tensors on a CPU.
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

    `ends` is the end of each group, in ascending order. The host does not read it, and an end after
    the last row counts as the last row. Rows after the last end are zero. Raises the errors of
    `matmul`.
    """
    return _multiply(left, right, ends.clamp(0, len(left)), len(left))


def total(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over the last dim. Local. The result has `dtype`, or the dtype of `values`.

    Raises:
        ShapeError: `values` has no dims.
        UnsupportedError: another dtype, gradients, or tensors on a CPU.
    """
    return _by_row("total", values, dtype, values)


def mean(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the mean over the last dim. Otherwise the same as `total`."""
    return _by_row("mean", values, dtype, values)


def softmax(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the softmax over the last dim. Otherwise the same as `total`."""
    return _by_row("softmax", values, dtype, values)


def log_softmax(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the logarithm of the softmax over the last dim. Otherwise the same as `total`."""
    return _by_row("log_softmax", values, dtype, values)


def rms_norm(values: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Compute torch's `rms_norm` over the last dim. Otherwise the same as `total`."""
    if weight.shape != values.shape[-1:]:
        raise ShapeError(f"{list(values.shape)} has no weight of shape {list(weight.shape)}.")
    return _by_row("rms_norm", values, None, weight.contiguous(), eps)


def _multiply(left: Tensor, right: Tensor, ends: Tensor, most: int) -> Tensor:
    _check(left, right)
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


def _by_row(
    kind: str, values: Tensor, dtype: torch.dtype | None, weight: Tensor, eps: float = 0.0
) -> Tensor:
    _check(values, weight)
    if not values.dim():
        raise ShapeError(f"{kind} needs values of at least one dim; got a scalar.")
    *rows, width = values.shape
    out = values.new_empty(rows if kind in ("total", "mean") else values.shape, dtype=dtype)
    if not out.numel():
        return out
    divisor = width if kind in ("mean", "rms_norm") else 1
    values, launch = (
        values.contiguous(),
        _launch_of_rows("total" if kind == "mean" else kind, width),
    )
    with torch.cuda.device_of(out):
        _compute_row[(math.prod(rows),)](values, weight, out, width, float(divisor), eps, **launch)
    return out


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        if not (x.is_cuda or _INTERPRETED):
            raise UnsupportedError(
                f"Triton runs on CUDA tensors; got one on {x.device}. Use batch_invariant() on a "
                "CPU. To test small sizes, set TRITON_INTERPRET=1 before the import."
            )
        if x.dtype not in _DTYPES or (x.requires_grad and torch.is_grad_enabled()):
            raise UnsupportedError(
                "the kernels take float32, bfloat16 and float16, and compute no gradients; got "
                f"{x.dtype}, requires_grad={x.requires_grad}. Call them inside torch.no_grad()."
            )
