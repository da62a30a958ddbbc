"""Attention over the keys of a sequence in pages of fixed size, in the order of positions.

A key that a query does not see gets a weight of zero. Such keys change no bit, because products
are added page by page, and zeros at the end of a sum do not change its order. So queries may be
computed together, prefilled in pieces, or one at a time over a cache.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ShapeError, UnsupportedError
from .rows import ROWS, matmul, pointwise, total, wide

__all__ = ["PAGE", "attend"]

PAGE = 4 * ROWS  # keys
QUERIES = 128  # at a time, because the memory of scores grows with queries times keys


def attend(
    query: Float[Tensor, "queries heads width"],
    key: Float[Tensor, "keys groups width"],
    value: Float[Tensor, "keys groups outs"],
    *,
    positions: Int[Tensor, " queries"],
    scale: float,
) -> Float[Tensor, "queries heads outs"]:
    """Compute attention from queries to keys of one sequence, up to each query's own position.

    Local. Tensors must be on a CPU, and gradients are not supported. The function computes in
    float32, or in float64 for float64 operands. The result has the dtype of `query`.

    Args:
        query: the queries. Heads that share a group of keys are neighbours.
        key: the keys from position 0 on.
        value: the values, possibly wider or narrower than the keys.
        positions: the last key that each query sees, counted from 0.
        scale: the factor by which scores are multiplied.

    Raises:
        ShapeError: groups do not divide the heads, or a position has no key.
        UnsupportedError: tensors are not on a CPU, or products on this CPU depend on the batch.
    """
    if query.device.type != "cpu":
        raise UnsupportedError(
            f"attend computes on a CPU, not on {query.device}. Pass kernels to batch_invariant."
        )
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
    missing = (0, 0, 0, 0, 0, -len(key) % PAGE)
    key, value = (
        F.pad(wide(each), missing).transpose(0, 1).unflatten(1, (-1, PAGE)) for each in (key, value)
    )
    key, value = key.mT.contiguous(), value.contiguous()
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    for start in range(0, len(query), QUERIES):
        chosen = slice(start, start + QUERIES)
        rows = wide(query[chosen]).unflatten(1, (len(key), -1)).transpose(0, 1)
        last = positions[chosen].repeat_interleave(rows.shape[2])[:, None]
        count = int(last.max()) // PAGE + 1
        products = [
            torch.cat([matmul(each.flatten(0, 1), page) for page in pages[:count]], 1)
            for each, pages in zip(rows, key, strict=True)
        ]
        unseen = torch.arange(count * PAGE) > last
        scores = (torch.stack(products) * scale).masked_fill_(unseen, -torch.inf)
        shares = pointwise(torch.exp, scores - scores.amax(-1, keepdim=True))
        products = [
            reduce(torch.add, map(matmul, each.split(PAGE, -1), pages))
            for each, pages in zip(shares, value, strict=True)
        ]
        found = torch.stack(products) / total(shares)[..., None]
        out[chosen] = found.view(*rows.shape[:3], -1).transpose(0, 1).flatten(1, 2).to(out.dtype)
    return out
