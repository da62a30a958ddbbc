"""Scores of an indexer in one pass, which stores only the sum over heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....errors import ShapeError, UnsupportedError
from ...attention.dsa.indexer import check_scored
from .rows import check_device, multiply

__all__ = ["TritonIndexScores", "launch_of_scores", "score_tiles"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST = 128  # Heads, and columns of a key.


@triton.jit
@no_type_check
def score_tiles(
    q,
    k,
    weights,
    out,
    queries,
    candidates,
    heads,
    dim,
    q_row,
    q_head,
    k_row,
    weights_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Score some queries, one after the other, against a tile of keys that stays loaded."""
    across = tl.cdiv(candidates, TILE)
    program = tl.program_id(0)
    candidate = program % across * TILE + tl.arange(0, TILE)
    top = program // across * QUERIES
    column = tl.arange(0, DIM)
    head = tl.arange(0, HEADS).to(tl.int64)
    inside = (candidate < candidates)[:, None] & (column < dim)[None, :]
    keys = tl.load(k + candidate.to(tl.int64)[:, None] * k_row + column[None, :], inside, other=0.0)
    inside = (head < heads)[:, None] & (column < dim)[None, :]
    q += head[:, None] * q_head + column[None, :]
    for row in tl.range(top, tl.minimum(top + QUERIES, queries), num_stages=STAGES):
        own = tl.load(q + tl.cast(row, tl.int64) * q_row, inside, other=0.0)
        products = tl.zeros((TILE, HEADS), tl.float32)
        products = multiply(keys, tl.trans(own), products)
        factors = tl.load(weights + tl.cast(row, tl.int64) * weights_row + head, head < heads, 0.0)
        # Not with a maximum, which would lose a NaN.
        products = tl.where(products < 0, 0.0, products) * factors.to(tl.float32)[None, :]
        place = out + tl.cast(row, tl.int64) * candidates + candidate
        tl.store(place, tl.sum(products, 1), candidate < candidates)


@dataclass(frozen=True)
class TritonIndexScores:
    """An `IndexScores` that launches one kernel, and usually allocates only the result.

    Operands may be float16, bfloat16 or float32, and sums are in float32. The kernel supports at
    most 128 heads of at most 128 columns. An operand whose columns are not adjacent in memory is
    copied first.
    """

    def __call__(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Score queries against keys. Local.

        Raises:
            ShapeError: shapes or dtypes do not fit.
            UnsupportedError: float64, more heads or columns, or tensors on a CPU.
        """
        check_device(q, k, weights)
        _check(q, k, weights)
        out = torch.empty(q.shape[0], k.shape[0], dtype=torch.float32, device=q.device)
        if out.numel():
            q, k, weights = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, weights))
            launch = launch_of_scores(q.shape[1], q.shape[2], q.dtype)
            grid = triton.cdiv(k.shape[0], launch["TILE"]) * triton.cdiv(
                q.shape[0], launch["QUERIES"]
            )
            with torch.cuda.device_of(q):
                score_tiles[(grid,)](
                    q,
                    k,
                    weights,
                    out,
                    *out.shape,
                    *q.shape[1:],
                    *q.stride()[:2],
                    k.stride(0),
                    weights.stride(0),
                    **launch,
                )
        return out


def launch_of_scores(heads: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the sizes of tiles, and the number of warps that share a tile. Pure."""
    wide = dtype == torch.float32
    return {
        "HEADS": max(16, triton.next_power_of_2(heads)),
        "DIM": max(16, triton.next_power_of_2(dim)),
        "QUERIES": 32,  # In turn: each query is read while the previous query is multiplied.
        "TILE": 16 if wide else 128,
        "STAGES": 2 if wide else 3,
        "num_warps": 8,
    }


def _check(q: Tensor, k: Tensor, weights: Tensor) -> None:
    shapes = check_scored(q, k, weights)
    if q.dtype != k.dtype or not weights.is_floating_point():
        raise ShapeError(
            f"q and k need one dtype, and weights must be floating-point; got {q.dtype}, "
            f"{k.dtype} and {weights.dtype}."
        )
    if q.dtype not in _DTYPES or weights.dtype == torch.float64 or max(q.shape[1:]) > _MOST:
        raise UnsupportedError(
            f"the kernel takes up to {_MOST} heads of up to {_MOST} columns, in float16, bfloat16 "
            f"or float32; got {shapes} in {q.dtype}, weights in {weights.dtype}. Use index_scores."
        )
