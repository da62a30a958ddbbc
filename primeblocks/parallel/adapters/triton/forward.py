"""Forward of attention over selected rows: one program per query and range of heads.

Tiles of selected rows stream through shared memory. Each tile is read once and multiplied twice,
with an online softmax between (arXiv:1805.02867). Selected rows are not copied in device memory.
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
    round_to,
    store_columns,
)

__all__ = ["attend"]


@triton.jit
@no_type_check
def attend(
    q,
    kv,
    indices,
    out,
    lse,
    heads,
    groups,
    entries,
    k,
    scale,
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
    """Compute attention of one query to its selected rows, for up to HEADS heads of one group.

    `heads` is the number of heads of a group. `scale` is the attention scale times
    log2(e), because the kernel uses `exp2`.
    """
    across = tl.cdiv(heads, HEADS)
    program = tl.program_id(0)
    head = program % across * HEADS + tl.arange(0, HEADS)
    own = head < heads
    group = program // across % groups
    token = (program // (across * groups)).to(tl.int64)
    indices += (token * groups + group) * k
    length = count_ids(indices, k, SPAN)
    kv += group.to(tl.int64) * kv_group
    q += token * q_token + (group * heads + head)[:, None] * q_head
    a = tl.arange(0, A)
    q_a = load_columns(q, a, own, WIDTH)
    q_b = q_a
    sum_a = tl.zeros((HEADS, A), tl.float32)
    if B:
        b = A + tl.arange(0, B)
        q_b = load_columns(q, b, own, WIDTH)
        if VALUE > A:
            sum_b = tl.zeros((HEADS, B), tl.float32)
    most = tl.full((HEADS,), float("-inf"), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        rows, seen, valid = choose_rows(kv, indices, start, length, entries, kv_row, TILE)
        scores, row_a, row_b = multiply_rows(q_a, q_b, rows, seen, WIDTH, A, B)
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        scores = tl.where(valid[None, :], scores, float("nan"))
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        mass = mass * shrink + tl.sum(weights, 1)
        weights = round_to(weights, row_a.dtype)
        sum_a = multiply(weights, row_a, sum_a * shrink[:, None])
        if B and VALUE > A:
            sum_b = multiply(weights, row_b, sum_b * shrink[:, None])
        most = higher
    # Without any id the output is 0, and lse is the logarithm of 0.
    mass = tl.where(mass == 0, 1.0, mass)
    where = (token * groups + group) * heads + head
    tl.store(lse + where, most * 0.6931471805599453 + tl.log(mass), own)
    out += where[:, None] * VALUE
    store_columns(out, a, sum_a / mass[:, None], own, VALUE)
    if B and VALUE > A:
        store_columns(out, b, sum_b / mass[:, None], own, VALUE)
