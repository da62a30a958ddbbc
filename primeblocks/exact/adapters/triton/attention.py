"""Attention over pages of keys, with a running maximum of scores."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import ShapeError, UnsupportedError
from .tiles import check, dot, round_to

__all__ = ["attend"]


@triton.jit
@no_type_check
def _read_rows(values, row, column, width, real):
    """Read elements of rows, and zeros after the `width` and for rows that are not real."""
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    return tl.load(values + at, real[:, None] & (column < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows", "keys"])
@no_type_check
def _attend_tile(
    query,
    key,
    value,
    positions,
    out,
    rows,
    keys,
    shared,
    width,
    outs,
    scale,
    WIDTH: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one tile of the result. A row is one query in one of the heads of a group."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group, groups = tl.program_id(1), tl.num_programs(1)
    token, real = row // shared, row < rows
    last = tl.minimum(tl.load(positions + token, real, other=0), keys - 1).to(tl.int32)
    row = (token * groups + group) * shared + row % shared
    inner, outer = tl.arange(0, INNER), tl.arange(0, OUTS)
    ones = tl.full((PAGE, 16), 1.0, tl.float32).to(value.dtype.element_ty)

    greatest = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS, 16), tl.float32)  # of weights, in equal columns
    found = tl.zeros((ROWS, OUTS), tl.float32)
    for start in tl.range(0, tl.max(last, 0) + 1, PAGE, num_stages=STAGES):
        at = start + tl.arange(0, PAGE)
        there = at * groups + group
        scores = tl.zeros((ROWS, PAGE), tl.float32)
        for first in tl.static_range(0, WIDTH, INNER):
            q = _read_rows(query, row, first + inner, width, real)
            k = _read_rows(key, there, first + inner, width, at < keys)
            scores = dot(q, tl.trans(k), scores)
        scores = tl.where(at[None, :] <= last[:, None], scores * scale, float("-inf"))
        most = tl.maximum(greatest, tl.max(scores, 1))
        base = tl.where(most == float("-inf"), 0.0, most)
        weights = round_to(tl.exp(scores - base[:, None]), value.dtype.element_ty)
        kept = tl.exp(greatest - base)[:, None]
        v = _read_rows(value, there, outer, outs, at < keys)
        found = dot(weights, v, found * kept)
        sums = dot(weights, ones, sums * kept)
        greatest = most
    found = tl.div_rn(found, tl.max(sums, 1)[:, None])
    out += row.to(tl.int64)[:, None] * outs + outer[None, :]
    found = round_to(found, out.dtype.element_ty)
    tl.store(out, found, real[:, None] & (outer < outs)[None, :])


def _launch_of_attention(dtype: torch.dtype, width: int, outs: int) -> dict[str, Any]:
    """Return the tile of queries and the page of keys for the widths of heads. Pure."""
    width, outs = (max(triton.next_power_of_2(each), 16) for each in (width, outs))
    sizes = {"WIDTH": width, "OUTS": outs, "enable_fp_fusion": False}
    if dtype == torch.float32:
        return sizes | {"ROWS": 16, "PAGE": 16, "INNER": 16, "STAGES": 1, "num_warps": 4}
    rows = 128 if max(width, outs) <= 128 else 64
    return sizes | {"ROWS": rows, "PAGE": 64, "INNER": width, "STAGES": 2, "num_warps": 8}


def attend(query: Tensor, key: Tensor, value: Tensor, *, positions: Tensor, scale: float) -> Tensor:
    """Compute `exact.attend`: attention from queries of one sequence to its keys. Local.

    `query`, `key`, `value` and `positions` have the shapes `[queries, heads, width]`,
    `[keys, groups, width]`, `[keys, groups, outs]` and `[queries]`. The host does not read
    `positions`. A position after the last key counts as the position of the last key, and the
    result of a negative position is undefined.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit together.
        UnsupportedError: heads are wider than 256, a dtype is not supported, an operand needs
            gradients, or tensors are on a CPU.
    """
    check(query, key, value)
    fits = query.dim() == key.dim() == value.dim() == 3 and positions.shape == query.shape[:1]
    fits = fits and key.shape[:2] == value.shape[:2] and query.shape[2] == key.shape[2]
    like = {(each.dtype, each.device) for each in (query, key, value)}
    if not fits or len(like) > 1 or positions.device != query.device:
        names = ("query", query), ("key", key), ("value", value), ("positions", positions)
        got = ", ".join(f"{k} {list(x.shape)} of {x.dtype} on {x.device}" for k, x in names)
        raise ShapeError(
            "attend needs [queries, heads, width], [keys, groups, width], [keys, groups, outs] and "
            f"[queries] on one device, the first three of one dtype; got {got}."
        )
    (queries, heads, width), (keys, groups, outs) = query.shape, value.shape
    if not groups or heads % groups or not keys:
        raise ShapeError(
            f"attend got {heads} heads and {keys} keys in {groups} groups. Groups must divide the "
            "heads, and there must be at least one key."
        )
    if max(width, outs) > 256:
        raise UnsupportedError(f"attend supports heads of width 256 at most; got {width}, {outs}.")
    out = query.new_empty(queries, heads, outs)
    if out.numel():
        launch, shared = _launch_of_attention(query.dtype, width, outs), heads // groups
        tiles = triton.cdiv(queries * shared, launch["ROWS"])
        operands = (each.contiguous() for each in (query, key, value, positions))
        sizes = (queries * shared, keys, shared, width, outs, scale)
        with torch.cuda.device_of(out):
            _attend_tile[(tiles, groups)](*operands, out, *sizes, **launch)
    return out
