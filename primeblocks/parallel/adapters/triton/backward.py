"""Backward of attention over selected rows, in two kernels.

Both stack queries and gradients of outputs as one matrix, and multiply it by the same rows. One
product gives scores and slopes of the weights, and another gives both parts of a row's gradient.
The first kernel runs over queries, like the forward. The second runs over tiles of selected rows,
sums all heads, and adds the sum to the rows' gradients once.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from .rows import (
    choose_rows,
    count_ids,
    load_columns,
    multiply,
    multiply_rows,
    read_rows,
    round_to,
    store_columns,
)

__all__ = ["add_to_rows", "find_slopes"]


@triton.jit
@no_type_check
def _load_stack(
    q,
    grad,
    first,
    heads,
    column,
    q_head,
    grad_head,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    TURN: tl.constexpr,
):
    """Load queries and gradients of outputs as lines of one matrix, TURN heads of each in turn."""
    line = tl.arange(0, 2 * HEADS)
    head = (first + line // (2 * TURN) * TURN + line % TURN)[:, None]
    of_q = (line // TURN % 2 == 1)[:, None]
    queries = q + head * q_head + column[None, :]
    gradients = grad + head * grad_head + column[None, :]
    inside = (head < heads) & tl.where(of_q, (column < WIDTH)[None, :], (column < VALUE)[None, :])
    return tl.load(tl.where(of_q, queries, gradients), inside, other=0.0)


@triton.jit
@no_type_check
def _unstack(x, TURN: tl.constexpr):
    """Separate lines of gradients and queries. With TURN = 8, a thread has both lines of a head."""
    heads: tl.constexpr = x.shape[0] // 2
    columns: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (heads // TURN, 2, TURN, columns)), (0, 2, 3, 1))
    first, second = tl.split(x)
    return tl.reshape(first, (heads, columns)), tl.reshape(second, (heads, columns))


@triton.jit
@no_type_check
def _multiply_by_gradients(out, grad, own, A: tl.constexpr, B: tl.constexpr, VALUE: tl.constexpr):
    """Return the dot product of each head's output and the output's gradient."""
    product = tl.zeros(own.shape, tl.float32)
    for part in tl.static_range(2 if B else 1):
        column = tl.arange(0, A) if part == 0 else A + tl.arange(0, B)
        if part == 0 or VALUE > A:
            slopes = load_columns(grad, column, own, VALUE).to(tl.float32)
            result = load_columns(out, column, own, VALUE).to(tl.float32)
            product += tl.sum(slopes * result, 1)
    return product


@triton.jit
@no_type_check
def _to_base_2(lse):
    """Return `lse` to base 2, or 0 for an `lse` of -inf, so that weights are 0 and not NaN."""
    return tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)


@triton.jit
@no_type_check
def find_slopes(
    grad,
    q,
    kv,
    indices,
    out,
    lse,
    dq,
    delta,
    heads,
    groups,
    entries,
    k,
    scale,
    grad_token,
    grad_head,
    q_token,
    q_head,
    kv_row,
    kv_group,
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Compute a query's gradient, and `delta`, the dot product of output and output's gradient."""
    across = tl.cdiv(heads, HEADS)
    program = tl.program_id(0)
    block = program % across * HEADS
    group = program // across % groups
    token = (program // (across * groups)).to(tl.int64)
    indices += (token * groups + group) * k
    length = count_ids(indices, k, SPAN)
    kv += group.to(tl.int64) * kv_group
    q += token * q_token + group * heads * q_head
    grad += token * grad_token + group * heads * grad_head
    head = block + tl.arange(0, HEADS)
    own = head < heads
    of_head = (token * groups + group) * heads + head
    out += of_head[:, None] * VALUE
    product = _multiply_by_gradients(out, grad + head[:, None] * grad_head, own, A, B, VALUE)
    tl.store(delta + of_head, product, own)
    total = _to_base_2(tl.load(lse + of_head, own, other=0.0))

    a = tl.arange(0, A)
    stack_a = _load_stack(q, grad, block, heads, a, q_head, grad_head, WIDTH, VALUE, HEADS, 8)
    stack_b = stack_a
    dq_a = tl.zeros((HEADS, A), tl.float32)
    if B:
        b = A + tl.arange(0, B)
        stack_b = _load_stack(q, grad, block, heads, b, q_head, grad_head, WIDTH, VALUE, HEADS, 8)
        dq_b = tl.zeros((HEADS, B), tl.float32)
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        rows, seen, valid = choose_rows(kv, indices, start, length, entries, kv_row, TILE)
        both, row_a, row_b = multiply_rows(stack_a, stack_b, rows, seen, WIDTH, A, B)
        slope, scores = _unstack(both, 8)
        scores = tl.where(seen[None, :], scores * (scale * 1.4426950408889634), float("-inf"))
        scores = tl.where(valid[None, :], scores, float("nan"))
        weights = tl.exp2(scores - total[:, None])
        slope = weights * (slope - product[:, None])
        slope = round_to(slope, row_a.dtype)
        dq_a = multiply(slope, row_a, dq_a)
        if B:
            dq_b = multiply(slope, row_b, dq_b)
    dq += of_head[:, None] * WIDTH
    store_columns(dq, a, dq_a * scale, own, WIDTH)
    if B:
        store_columns(dq, b, dq_b * scale, own, WIDTH)


@triton.jit
@no_type_check
def add_to_rows(
    grad,
    q,
    kv,
    indices,
    lse,
    delta,
    dkv,
    heads,
    groups,
    entries,
    k,
    scale,
    row_width,
    grad_token,
    grad_head,
    q_token,
    q_head,
    kv_row,
    kv_group,
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the gradients of a tile of one query's rows, summed over heads."""
    tiles = tl.cdiv(k, TILE)
    program = tl.program_id(0)
    at = program % tiles * TILE + tl.arange(0, TILE)
    group = program // tiles % groups
    token = (program // (tiles * groups)).to(tl.int64)
    ids = tl.load(indices + (token * groups + group) * k + at, at < k, other=-1)
    if tl.max(ids, 0) < 0:
        return
    seen = (ids >= 0) & (ids < entries)
    place = tl.where(seen, ids, 0).to(tl.int64)
    rows = kv + group.to(tl.int64) * kv_group + place[:, None] * kv_row
    a = tl.arange(0, A)
    row_a = read_rows(rows, a, seen, WIDTH, A)
    sum_a = tl.zeros((TILE, A), tl.float32)
    if B:
        b = A + tl.arange(0, B)
        row_b = read_rows(rows, b, seen, WIDTH, A + B)
        sum_b = tl.zeros((TILE, B), tl.float32)
    q += token * q_token + group * heads * q_head
    grad += token * grad_token + group * heads * grad_head
    of_heads = (token * groups + group) * heads
    for first in tl.range(0, heads, HEADS, num_stages=STAGES):
        head = first + tl.arange(0, HEADS)
        # Heads that do not exist have weights of 0.
        total = tl.load(lse + of_heads + head, head < heads, other=float("inf"))
        product = tl.load(delta + of_heads + head, head < heads, other=0.0)
        stack_a = _load_stack(q, grad, first, heads, a, q_head, grad_head, WIDTH, VALUE, HEADS, 1)
        both = tl.zeros((TILE, 2 * HEADS), tl.float32)
        both = multiply(row_a, tl.trans(stack_a), both)
        if B:
            stack_b = _load_stack(
                q, grad, first, heads, b, q_head, grad_head, WIDTH, VALUE, HEADS, 1
            )
            both = multiply(row_b, tl.trans(stack_b), both)
        slope, scores = tl.split(tl.reshape(both, (TILE, HEADS, 2)))
        scores = scores * (scale * 1.4426950408889634) - _to_base_2(total)[None, :]
        weights = tl.exp2(tl.where(seen[:, None], scores, float("-inf")))
        slope = weights * (slope - product[None, :]) * scale
        stacked = tl.reshape(tl.join(weights, slope), (TILE, 2 * HEADS))
        stacked = round_to(stacked, row_a.dtype)
        sum_a = multiply(stacked, stack_a, sum_a)
        if B:
            sum_b = multiply(stacked, stack_b, sum_b)
    target = dkv + (place * groups + group)[:, None] * row_width
    inside = seen[:, None] & (a < WIDTH)[None, :]
    tl.atomic_add(target + a[None, :], sum_a, inside, sem="relaxed")
    if B:
        inside = seen[:, None] & (b < WIDTH)[None, :]
        tl.atomic_add(target + b[None, :], sum_b, inside, sem="relaxed")
