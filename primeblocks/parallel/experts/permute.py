"""Tokens permuted to rows, one for each choice or rank, and the rows of a token summed up again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["RowMap", "map_rows", "permute", "unpermute"]


class RowMap(NamedTuple):
    """The token of each row and the rows of each token, so that nothing has to scatter.

    Attributes:
        source: `[rows]`, the token of each row.
        rows: `[rows]`, the rows of each token, token after token.
        starts: `[tokens]`, where each token's rows begin in `rows`.
    """

    source: Tensor
    rows: Tensor
    starts: Tensor


def map_rows(source: Tensor, *, tokens: int) -> RowMap:
    """Return both directions of `source`, in the order of rows; a token may have no row. Local."""
    counts = torch.bincount(source, minlength=tokens)
    return RowMap(source, source.argsort(stable=True), counts.cumsum(0) - counts)


def permute(x: Tensor, row_map: RowMap) -> Tensor:
    """Copy tokens: `[tokens, hidden]` to `[rows, hidden]`. Local; its backward is `unpermute`."""
    return _Permute.apply(x, row_map)


def unpermute(rows: Tensor, row_map: RowMap, weights: Tensor | None = None) -> Tensor:
    """Add up each token's rows, weighted: `[rows, hidden]` to `[tokens, hidden]`. Local.

    Sums are made in float32 for low precision, in one fixed order; of float32 weights at least 16
    bits count. Its backward is `permute`.

    Args:
        weights: one for each entry of `row_map.rows`.
    """
    return _Unpermute.apply(rows, row_map, weights)


class _Permute(torch.autograd.Function):
    """A gather whose backward gathers: torch's scatters, slower and on a GPU in no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_map: RowMap) -> Tensor:
        ctx.save_for_backward(*row_map)
        return x.index_select(0, row_map.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _sum(grads[0], RowMap(*ctx.saved_tensors), None), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_map: RowMap, weights: Tensor | None) -> Tensor:
        if weights is None:
            # No saved tensor: a checkpoint recomputes up to the last of them, and need not bring
            # these rows back from other ranks a second time.
            ctx.source = row_map.source
        else:
            ctx.source = None
            # Rows are the largest thing here: kept only for the gradient that needs them.
            kept = rows if ctx.needs_input_grad[2] else None
            ctx.save_for_backward(row_map.source, row_map.rows, weights, kept)
        return _sum(rows, row_map, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor | None]:
        (grad,) = grads
        if ctx.source is not None:
            return grad.index_select(0, ctx.source), None, None
        source, order, weights, rows = ctx.saved_tensors
        grad = grad.contiguous()
        by_row = torch.empty_like(weights)
        by_row[order] = weights
        # A bag of one row is a gather that multiplies in passing.
        of_rows = _bags(grad, source, torch.arange(len(source), device=grad.device), by_row)
        if rows is None:
            return of_rows, None, None
        return of_rows, None, _dots(rows, grad, source)[order].to(weights.dtype)


def _sum(rows: Tensor, row_map: RowMap, weights: Tensor | None) -> Tensor:
    if not len(rows):  # An empty table has no row to look up, not even for an empty bag.
        return rows.new_zeros(len(row_map.starts), rows.shape[1])
    return _bags(rows.contiguous(), row_map.rows, row_map.starts, weights)


def _bags(rows: Tensor, chosen: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of chosen rows from each start to the next one."""
    if weights is not None and weights.dtype != rows.dtype:
        high = weights.to(rows.dtype)
        if weights.dtype.itemsize > high.dtype.itemsize == 2:
            # torch wants weights in the dtype of rows: each row comes twice, the second time for
            # what rounding took from its weight. Products are summed in float32.
            low = (weights - high).to(rows.dtype)
            high = torch.stack((high, low), dim=1).flatten()
            chosen, starts = chosen[:, None].expand(-1, 2).flatten(), 2 * starts
        weights = high
    return F.embedding_bag(chosen, rows, starts, mode="sum", per_sample_weights=weights)


def _dots(rows: Tensor, grad: Tensor, source: Tensor) -> Tensor:
    """`[rows]`: each row times the gradient of its token, in float32 for low precision."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    grad, step = grad.to(wide), max(len(rows), 1)
    if rows.dtype != wide:  # By parts: on a CPU they stay in its cache while they are wide.
        step = 512 if rows.device.type == "cpu" else 65536
    found = grad.new_empty(len(rows))
    for start in range(0, len(rows), step):
        part, tokens = rows[start : start + step].to(wide), source[start : start + step]
        each = torch.arange(len(part), device=rows.device)
        # Autograd's own function for the weights of an embedding bag: a dot product each, no copy.
        found[start : start + step] = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            grad, part, each, each, tokens, 0
        )
    return found
