"""Rows of a table as kernels read them: columns in two parts, a query's ids, and rounding.

Sides of matrices are powers of two. So 576 columns are read as 512 and 64, and not as 1024. All
columns are the key, and the first columns are also the value, so each column is read once for both.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from ....errors import UnsupportedError
from ...attention.dsa.kernel import Rows

__all__ = [
    "INTERPRETED",
    "check_device",
    "choose_rows",
    "columns_of",
    "count_ids",
    "load_columns",
    "multiply",
    "multiply_rows",
    "read_rows",
    "round_to",
    "store_columns",
]

# Decided at import, as Triton itself does.
INTERPRETED = bool(triton.knobs.runtime.interpret)
_EMULATED = tl.constexpr(INTERPRETED)
WIDEST = 576


def columns_of(rows: Rows) -> dict[str, int]:
    """Return the numbers of columns that a query reads, by the names of kernel arguments. Local.

    `A` and `B` are the sizes of the two parts. `B` may be 0.

    Raises:
        UnsupportedError: the value is not a part of the key, or the rows span more columns than fit
            into a GPU's shared memory.
    """
    width, value = rows.key_dim, rows.value_dim
    if rows.key[0] or rows.value[0] or value > width or width > WIDEST:
        raise UnsupportedError(
            f"the kernel needs keys of up to {WIDEST} columns that start at column 0, with the "
            f"value in their first columns, such as Rows.latent(512, 64); got {rows}. Use "
            "ReferenceKernel()."
        )
    part = max(16, 1 << (width.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(width - part)) if width > part else 0
    return {"WIDTH": width, "A": part, "B": rest, "VALUE": value}


def check_device(*tensors: Tensor) -> None:
    for x in tensors:
        if not (x.is_cuda or INTERPRETED):
            raise UnsupportedError(
                f"Triton runs on CUDA tensors; got one on {x.device}. Move it, or use "
                "ReferenceKernel() and index_scores. To test small sizes, set TRITON_INTERPRET=1 "
                "before the import."
            )


@triton.jit
@no_type_check
def count_ids(indices, k, SPAN: tl.constexpr):
    """Count the ids of a query. They come first, and -1 after them."""
    total = 0
    for start in range(0, k, SPAN):
        at = start + tl.arange(0, SPAN)
        total += tl.sum((tl.load(indices + at, at < k, other=-1) >= 0).to(tl.int32), 0)
    return total


@triton.jit
@no_type_check
def choose_rows(kv, indices, start, length, entries, kv_row, TILE: tl.constexpr):
    """Find a tile of a query's rows: addresses, which ids exist, and which are in bounds."""
    at = start + tl.arange(0, TILE)
    ids = tl.load(indices + at, at < length, other=-1)
    # The ids were not checked: stay in bounds, and let a wrong id show in the output.
    seen = (ids >= 0) & (ids < entries)
    rows = kv + tl.where(seen, ids, 0).to(tl.int64)[:, None] * kv_row
    return rows, seen, ids < entries


@triton.jit
@no_type_check
def read_rows(rows, column, seen, WIDTH: tl.constexpr, END: tl.constexpr):
    """Read columns up to END - 1 of rows with WIDTH columns. Columns from WIDTH on are zeros."""
    inside = seen[:, None]
    if END > WIDTH:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(rows + column[None, :], inside, other=0.0)


@triton.jit
@no_type_check
def multiply_rows(x_a, x_b, rows, seen, WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Read rows and multiply `x @ rows.T`. Without a part B, part A is returned in its place."""
    row_a = read_rows(rows, tl.arange(0, A), seen, WIDTH, A)
    product = tl.zeros((x_a.shape[0], rows.shape[0]), tl.float32)
    product = multiply(x_a, tl.trans(row_a), product)
    row_b = row_a
    if B:
        row_b = read_rows(rows, A + tl.arange(0, B), seen, WIDTH, A + B)
        product = multiply(x_b, tl.trans(row_b), product)
    return product, row_a, row_b


@triton.jit
@no_type_check
def load_columns(x, column, own, END: tl.constexpr):
    """Load columns up to END - 1 of vectors. Later columns are zeros."""
    inside = own[:, None] & (column < END)[None, :]
    return tl.load(x + column[None, :], inside, other=0.0)


@triton.jit
@no_type_check
def store_columns(x, column, values, own, END: tl.constexpr):
    """Store columns up to END - 1 of vectors, rounded to their dtype."""
    inside = own[:, None] & (column < END)[None, :]
    tl.store(x + column[None, :], round_to(values, x.dtype.element_ty), inside)


@triton.jit
@no_type_check
def multiply(a, b, total):
    """Add `a @ b` to a sum in float32."""
    if _EMULATED:  # The interpreter takes the bits of bfloat16 for integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
@no_type_check
def round_to(x, DTYPE: tl.constexpr):
    """Round float32 to DTYPE, ties to even."""
    if _EMULATED and tl.bfloat16 == DTYPE:  # The interpreter truncates.
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        number = (bits & 0x7FFFFFFF) <= 0x7F800000
        x = tl.where(number, near.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)
