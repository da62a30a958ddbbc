"""Copies of tokens to rows, one for each choice or rank, and sums of a token's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...groups import outside_graphs

__all__ = ["RowMap", "map_choices", "map_rows", "permute", "regroup", "spread", "unpermute"]

# The bytes of rows to widen at a time on a CPU. A GPU widens 16 times as many.
_WIDE_BYTES = 4 << 20


class RowMap(NamedTuple):
    """The token of each row and the rows of each token, so that no kernel has to scatter.

    Attributes:
        source: `[rows]`, the token of each row. A row that is not read may name any token.
        rows: the rows of each token that are read, token after token.
        starts: `[tokens]`, the place in `rows` where each token's rows begin. None if every token
            has one row.
    """

    source: Tensor
    rows: Tensor
    starts: Tensor | None


def map_rows(source: Tensor, *, tokens: int) -> RowMap:
    """Return the map of `source`, in the order of rows. A token may have no row. Local."""
    ordered, rows = source.sort(stable=True)
    each = torch.arange(tokens, dtype=source.dtype, device=source.device)
    return RowMap(source, rows, torch.searchsorted(ordered, each))


def map_choices(slots: Tensor, *, tokens: int, top_k: int) -> RowMap:
    """Return the map of sorted choices. A token's rows keep the order of its choices. Local."""
    inverse = torch.empty_like(slots).scatter_(0, slots, _count(len(slots), slots))
    return RowMap(slots // max(top_k, 1), inverse, _count(tokens, slots) * top_k)


def regroup(counts: Tensor, *, rows: int) -> RowMap:
    """Return the map from rows in order (source, expert) to order (expert, source). Local.

    `counts` are `[sources, experts]`, and `rows` is their sum.
    """
    by_expert = counts.t()
    arrived = _before(counts)
    wanted = _before(by_expert).t()
    places = _count(rows, counts) + _of_rows(wanted - arrived, counts, rows)
    source = _count(rows, counts) + _of_rows((arrived - wanted).t(), by_expert, rows)
    return RowMap(source, places, None)


def spread(row_map: RowMap, counts: Tensor, *, room: int) -> RowMap:
    """Move each group of rows into a range of `room` rows. The other rows are not read. Local.

    Args:
        counts: rows of each consecutive group, adding up to all. If a group has more than `room`
            rows, the result is undefined.
    """
    rows, size = len(row_map.source), len(counts) * room
    free = torch.arange(0, size, room, device=counts.device) - _before(counts)
    places = (_count(rows, counts) + _of_rows(free, counts, rows)).clamp(max=size - 1)
    source = row_map.source.new_zeros(size).scatter_(0, places, row_map.source)
    return RowMap(source, places[row_map.rows], row_map.starts)


def _count(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _before(counts: Tensor) -> Tensor:
    """Return the number of rows before each entry, in the order in which entries are read."""
    return (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)


def _of_rows(values: Tensor, counts: Tensor, rows: int) -> Tensor:
    return values.flatten().repeat_interleave(counts.flatten(), output_size=rows)


def permute(x: Tensor, row_map: RowMap) -> Tensor:
    """Copy tokens: `[tokens, hidden]` to `[rows, hidden]`. Local. Its backward is `unpermute`."""
    return _Permute.apply(x, row_map)


@outside_graphs  # A compiler may leave out the rounding of weights, on which `_bags` depends.
def unpermute(rows: Tensor, row_map: RowMap, weights: Tensor | None = None) -> Tensor:
    """Sum each token's rows, weighted: `[rows, hidden]` to `[tokens, hidden]`. Local.

    Low precision is summed in float32, in a fixed order. With bfloat16 rows, float32 weights keep
    at least 16 significant bits. The backward is `permute`.

    Args:
        weights: one weight for each entry of `row_map.rows`.
    """
    return _Unpermute.apply(rows, row_map, weights)


class _Permute(torch.autograd.Function):
    """A gather whose backward gathers, too.

    torch's backward would scatter, which is slow, and on a GPU sums in no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_map: RowMap) -> Tensor:
        ctx.save_for_backward(*row_map)
        return _copies(x, row_map.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _sum(grads[0], RowMap(*ctx.saved_tensors), None), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_map: RowMap, weights: Tensor | None) -> Tensor:
        if weights is None:
            # Save no tensor here: a checkpoint recomputes up to the last saved tensor, and would
            # fetch these rows from other ranks a second time.
            ctx.source = row_map.source
        else:
            ctx.source = None
            # Rows are the largest tensor here, so keep them only if a gradient needs them.
            kept = rows if ctx.needs_input_grad[2] else None
            ctx.save_for_backward(row_map.source, row_map.rows, weights, kept)
        return _sum(rows, row_map, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor | None]:
        (grad,) = grads
        if ctx.source is not None:
            return _copies(grad, ctx.source), None, None
        source, order, weights, rows = ctx.saved_tensors
        grad = grad.contiguous()
        if not len(grad):
            none = None if rows is None else torch.zeros_like(weights)
            return _copies(grad, source), None, none
        by_row = weights.new_zeros(len(source))  # Rows that are not read keep a weight of 0.
        by_row[order] = weights
        # A bag of one row is a gather that also multiplies.
        of_rows = _bags(grad, source, _count(len(source), source), by_row)
        if rows is None:
            return of_rows, None, None
        return of_rows, None, _dots(rows, grad, source)[order].to(weights.dtype)


def _copies(x: Tensor, source: Tensor) -> Tensor:
    # Without tokens there may still be rows, which are not read.
    return x.index_select(0, source) if len(x) else x.new_zeros(len(source), x.shape[1])


def _sum(rows: Tensor, row_map: RowMap, weights: Tensor | None) -> Tensor:
    if row_map.starts is None:
        assert weights is None
        return rows.index_select(0, row_map.rows)
    if not len(rows):  # An empty table has no row to look up, not even for an empty bag.
        return rows.new_zeros(len(row_map.starts), rows.shape[1])
    return _bags(rows.contiguous(), row_map.rows, row_map.starts, weights)


def _bags(rows: Tensor, chosen: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of the chosen rows from each start to the next start."""
    if weights is not None and weights.dtype != rows.dtype:
        high = weights.to(rows.dtype)
        if weights.dtype.itemsize > high.dtype.itemsize == 2:
            # torch requires weights in the dtype of rows. So each row comes twice, the second time
            # with the rounding error of its weight. Products are summed in float32.
            low = (weights - high).to(rows.dtype)
            high = torch.stack((high, low), dim=1).flatten()
            chosen, starts = chosen[:, None].expand(-1, 2).flatten(), 2 * starts
        weights = high
    return F.embedding_bag(chosen, rows, starts, mode="sum", per_sample_weights=weights)


def _dots(rows: Tensor, grad: Tensor, source: Tensor) -> Tensor:
    """Return `[rows]`: dot products of rows and their tokens' gradients, in at least float32."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    step = max(len(rows), 1)
    if rows.dtype != wide:  # In parts, because a CPU's cache and a GPU's memory are small.
        on_cpu = rows.device.type == "cpu"
        step = max(1, (_WIDE_BYTES if on_cpu else 16 * _WIDE_BYTES) // max(4 * rows.shape[1], 1))
        grad = grad.to(wide) if on_cpu else grad
    found = rows.new_empty(len(rows), dtype=wide)
    for start in range(0, len(rows), step):
        part, at = rows[start : start + step].to(wide), source[start : start + step]
        each, against = torch.arange(len(part), device=rows.device), grad
        if grad.dtype != wide:
            against, at = grad.index_select(0, at).to(wide), each
        # Autograd's own function for an embedding bag's weights: one dot product per row, no copy.
        found[start : start + step] = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            against, part, each, each, at, 0
        )
    return found
