"""Sums over the last dim, in a tree of neighbours."""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import ShapeError
from .tiles import check, round_to

__all__ = ["log_softmax", "softmax", "total"]


@triton.jit
@no_type_check
def _add_neighbours(values):
    """Add the 2^n values of each row: neighbours, then neighbouring sums, and so on."""
    if values.shape[1] == 1:
        return tl.sum(values, 1)  # This removes the dim.
    else:
        pairs = tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2))
        even, odd = tl.split(pairs)
        return _add_neighbours(even + odd)


@triton.jit
@no_type_check
def _read(values, start, width, PAD: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)[None, :]
    return tl.load(values + at, at < width, other=PAD).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def _compute_rows(
    values,
    out,
    rows,
    width,
    KIND: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Compute the function KIND of some rows. The PAD after a row changes no sum."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(row, rows - 1)  # So the last row may be computed again.
    values += row[:, None] * width
    greatest = 0.0
    if PAD < 0:  # -inf, for a softmax
        maxima = tl.full((ROWS, BLOCK), PAD, tl.float32)
        for start in range(0, width, BLOCK):
            maxima = tl.maximum(maxima, _read(values, start, width, PAD, BLOCK))
        greatest = tl.max(maxima, 1)[:, None]
        greatest = tl.where(greatest == PAD, 0.0, greatest)
    sums = tl.zeros((ROWS, TILES), tl.float32)
    for start in range(0, width, BLOCK):
        x = _read(values, start, width, PAD, BLOCK)
        if PAD < 0:
            x = tl.exp(x - greatest)
        here = tl.arange(0, TILES)[None, :] == start // BLOCK
        sums = tl.where(here, _add_neighbours(x)[:, None], sums)
    found = _add_neighbours(sums)
    if KIND == "total":
        tl.store(out + row, round_to(found, out.dtype.element_ty))
        return
    out += row[:, None] * width
    found = found[:, None]
    for start in range(0, width, BLOCK):
        x = _read(values, start, width, PAD, BLOCK)
        if KIND == "softmax":
            x = tl.div_rn(tl.exp(x - greatest), found)
        if KIND == "log_softmax":
            x = x - greatest - tl.log(found)
        at = start + tl.arange(0, BLOCK)[None, :]
        tl.store(out + at, round_to(x, out.dtype.element_ty), at < width)


def _launch_of_rows(kind: str, width: int) -> dict[str, Any]:
    """Return how a program reads rows. Fusion is off, because it omits a rounding. Pure."""
    block = min(triton.next_power_of_2(max(width, 1)), 1024)
    tiles = triton.next_power_of_2(max(triton.cdiv(width, block), 1))
    names = {"KIND": kind, "PAD": -math.inf if kind.endswith("softmax") else 0.0}
    names |= {"ROWS": 1024 // block, "BLOCK": block, "TILES": tiles}
    return names | {"num_warps": 4, "enable_fp_fusion": False}


def total(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum `values` over the last dim. Local. The result has `dtype`, or the dtype of `values`.

    Raises:
        ShapeError: `values` has no dims.
        UnsupportedError: a dtype is not supported, an operand needs gradients, or tensors are on a
            CPU.
    """
    return _by_row("total", values, dtype)


def softmax(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the softmax over the last dim. Local. Dtype and errors are as for `total`."""
    return _by_row("softmax", values, dtype)


def log_softmax(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the logarithm of `softmax`. Local. Dtype and errors are as for `total`."""
    return _by_row("log_softmax", values, dtype)


def _by_row(kind: str, values: Tensor, dtype: torch.dtype | None) -> Tensor:
    check(values)
    if not values.dim():
        raise ShapeError(f"{kind} needs values of at least one dim; got a scalar.")
    *rows, width = values.shape
    out = values.new_empty(rows if kind == "total" else values.shape, dtype=dtype)
    if out.numel():
        launch, count = _launch_of_rows(kind, width), math.prod(rows)
        programs = triton.cdiv(count, launch["ROWS"])
        with torch.cuda.device_of(out):
            _compute_rows[(programs,)](values.contiguous(), out, count, width, **launch)
    return out
