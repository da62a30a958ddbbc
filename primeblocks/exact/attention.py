"""Attention over the keys of a sequence in pages of fixed size, in the order of positions.

A key that a query does not see gets a weight of zero. Such keys change no bit, because products
are added page by page, and zeros at the end of a sum do not change its order. So queries may be
computed together, prefilled in pieces, or one at a time over a cache.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ShapeError, UnsupportedError
from .rows import ROWS, matmul, pointwise, total, wide

__all__ = ["PAGE", "attend", "scaled_dot_product_attention"]

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


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Compute torch's function, for masks in which each query sees a contiguous range of keys.

    Pages begin at the first key that a query sees. A sequence in a packed row therefore has the
    bits that it has alone. `attend` computes the pages. Differentiable, with torch's backward.

    Raises:
        UnsupportedError: dropout, a bias, another shape, a mask with gaps, or a mask that differs
            between heads.
    """
    if dropout_p:
        raise UnsupportedError(f"attention has dropout {dropout_p}. Set dropout to 0.")
    if query.dim() != 4 or not len(query) == len(key) == len(value):
        raise UnsupportedError(
            f"attention of {tuple(query.shape)} to {tuple(key.shape)} and {tuple(value.shape)} is "
            "not supported. Pass [batch, heads, tokens, width]."
        )
    if attn_mask is not None and is_causal:
        raise UnsupportedError("attention got a mask and is_causal=True. Pass only one of them.")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Paged.apply(query, key, value, attn_mask, is_causal, scale, attend)


class _Paged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.call = is_causal, scale
        return _by_pages(query, key, value, mask, is_causal, scale, attend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, mask = ctx.saved_tensors
        is_causal, scale = ctx.call
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
            q, k, v = (each.detach().requires_grad_() for each in (query, key, value))
            shares = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=shares
            )
            found = torch.autograd.grad(out, (q, k, v), grads[0])
        return *found, None, None, None, None


def _by_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    attend: Callable[..., Tensor],
) -> Tensor:
    with _disable_current_modes():
        first, last = _runs(query, key, mask, is_causal)
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for at, (starts, ends) in enumerate(zip(first, last, strict=True)):
            for start in starts[ends >= 0].unique().tolist():
                chosen = ((starts == start) & (ends >= 0)).nonzero()[:, 0]
                keys = slice(start, int(ends[chosen].max()) + 1)
                found = attend(
                    query[at][:, chosen].transpose(0, 1),
                    key[at][:, keys].transpose(0, 1),
                    value[at][:, keys].transpose(0, 1),
                    positions=ends[chosen] - start,
                    scale=scale,
                )
                out[at][:, chosen] = found.transpose(0, 1)
    return out


def _runs(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each query sees, both `[batch, queries]`.

    The last key is -1 if a query sees no key.
    """
    batch, queries, keys = len(query), query.shape[-2], key.shape[-2]
    if mask is None:
        last = torch.arange(queries, device=query.device).clamp(max=keys - 1)
        last = (last if is_causal else torch.full_like(last, keys - 1)).expand(batch, queries)
        return torch.zeros_like(last), last
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool(((mask < -1e4) | seen).all()):
        raise UnsupportedError("the mask is added to scores. Pass a mask of bools.")
    seen = seen.broadcast_to(batch, seen.shape[1] if seen.dim() == 4 else 1, queries, keys)
    if not torch.equal(seen, seen[:, :1].expand_as(seen)):
        raise UnsupportedError("the mask differs between heads. Call attention once per head.")
    seen = seen[:, 0]
    count = seen.sum(-1)
    first = seen.int().argmax(-1)
    last = torch.where(count > 0, first + count - 1, -1)
    at = torch.arange(keys, device=seen.device)
    if not torch.equal(seen, (at >= first[..., None]) & (at <= last[..., None])):
        raise UnsupportedError(
            "a query sees keys with a gap between them. Use a mask in which each query sees a "
            "contiguous range."
        )
    return first, last
