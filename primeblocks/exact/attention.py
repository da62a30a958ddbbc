"""Attention over the keys of a sequence in pages of fixed size, in the order of positions.

Each page is merged into a running maximum of scores, a weight and an output. A page that a query
does not see multiplies these by one and adds zero, which changes no bit. So queries may be computed
together, prefilled in pieces, or one at a time over a cache.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ShapeError
from .rows import ROWS, matmul, pointwise, total, wide

__all__ = ["PAGE", "attend"]

PAGE = ROWS  # keys


def attend(
    query: Float[Tensor, "queries heads width"],
    key: Float[Tensor, "keys groups width"],
    value: Float[Tensor, "keys groups outs"],
    *,
    positions: Int[Tensor, " queries"],
    scale: float,
) -> Float[Tensor, "queries heads outs"]:
    """Attend from queries of one sequence to its keys, each up to its own position.

    Local. On a CPU, without gradients. Computes in float32, or in float64 for float64 operands. The
    result has the dtype of `query`.

    Args:
        query: the queries. Heads that share a group of keys are neighbours.
        key: the keys from position 0 on.
        value: the values. Their width may differ from the keys'.
        positions: the last key that each query sees, counted from 0.
        scale: factor of the scores.

    Raises:
        ShapeError: groups do not divide the heads, or a position has no key.
        UnsupportedError: this processor's products depend on the batch.
    """
    heads, groups, keys = query.shape[1], key.shape[1], len(key)
    if heads % groups or key.shape[:2] != value.shape[:2]:
        raise ShapeError(
            f"attend got {heads} heads, {keys} keys in {groups} groups and {len(value)} values in "
            f"{value.shape[1]} groups. Keys and values need equal shapes, and groups must divide "
            "the heads."
        )
    with _disable_current_modes():
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < keys:
            raise ShapeError(
                f"attend got positions {int(positions.min())} to {int(positions.max())} for "
                f"{keys} keys. Positions must be from 0 to {keys - 1}."
            )
        return _walk(query, key, value, positions, scale)


def _walk(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float) -> Tensor:
    queries, heads, _ = query.shape
    keys, groups, _ = key.shape
    shared = heads // groups
    last = positions.repeat_interleave(shared)[:, None]
    missing = (0, 0, 0, 0, 0, -keys % PAGE)
    key, value = (F.pad(wide(each), missing).transpose(0, 1) for each in (key, value))
    out = query.new_empty(queries, heads, value.shape[-1])
    for group in range(groups):
        chosen = slice(group * shared, (group + 1) * shared)
        rows = wide(query[:, chosen]).flatten(0, 1)
        greatest = rows.new_full((len(rows), 1), -torch.inf)
        weight = rows.new_zeros(len(rows), 1)
        found = rows.new_zeros(len(rows), value.shape[-1])
        for start in range(0, keys, PAGE):
            page = slice(start, start + PAGE)
            scores = matmul(rows, key[group, page].t().contiguous()) * scale
            unseen = torch.arange(start, start + PAGE) > last
            scores = scores.masked_fill(unseen, -torch.inf)
            greater = torch.maximum(greatest, scores.amax(-1, keepdim=True))
            kept = pointwise(torch.exp, greatest - greater)
            shares = pointwise(torch.exp, scores - greater)
            weight = weight * kept + total(shares, (-1,), keepdim=True)
            found = found * kept + matmul(shares, value[group, page].contiguous())
            greatest = greater
        out[:, chosen] = (found / weight).unflatten(0, (queries, shared)).to(out.dtype)
    return out
