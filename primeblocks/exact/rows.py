"""Operations in which every row has one order of additions. Local. On a CPU.

Sums and softmax are computed in float32 or wider, and return that dtype.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError

__all__ = ["ROWS", "log_softmax", "logsumexp", "matmul", "pointwise", "softmax", "total", "wide"]

ROWS = 32  # of every product: a kernel chooses its order by the shape of its operands
COLUMNS = 16  # at least: below 12, MKL on an AMD EPYC chooses an order by a row's place
VECTOR = 64  # elements: two of the longest registers, of the shortest type
PIECE = 32768  # elements, too few for torch to split among threads

_proved: set[tuple[Any, ...]] = set()


def matmul(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `[rows, in]` by `[in, out]`, 32 rows at a time, padded with rows of zeros.

    A weight of fewer than 16 columns is padded with columns of zeros. The first product of a shape
    tests this processor's kernel on random rows. A row must have the same bits at another place,
    next to other rows, and with one thread.

    Raises:
        UnsupportedError: the bits differ.
    """
    count, columns = rows.shape[0], weight.shape[1]
    if columns < COLUMNS:
        weight = F.pad(weight, (0, COLUMNS - columns))
    parts = F.pad(rows, (0, 0, 0, -count % ROWS)).contiguous().split(ROWS)
    if not count:
        parts = (rows.new_zeros(0, rows.shape[1]),)
    else:
        _prove(weight)
    out = torch.cat([torch.mm(part, weight) for part in parts])[:count, :columns].contiguous()
    return out if bias is None else out + bias


def _prove(weight: Tensor) -> None:
    threads = torch.get_num_threads()
    shape = (*weight.shape, *weight.stride(), weight.dtype, threads)
    if shape in _proved:
        return
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, weight.shape[0], generator=draw).to(weight.dtype)
    found = torch.mm(rows, weight)
    turned = torch.mm(rows.roll(5, 0), weight).roll(-5, 0)
    alone = torch.mm(torch.cat([rows[:1], torch.ones_like(rows[1:])]), weight)
    same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    holds = same(found, turned) and same(found[:1], alone[:1])
    if threads > 1:
        torch.set_num_threads(1)
        try:
            holds = holds and same(found, torch.mm(rows, weight))
        finally:
            torch.set_num_threads(threads)
    if not holds:
        raise UnsupportedError(
            f"on this processor a product of {ROWS} rows with {tuple(weight.shape)} in "
            f"{weight.dtype} depends on the place of a row, on other rows or on {threads} threads. "
            "Try torch.set_num_threads(1), or another dtype."
        )
    _proved.add(shape)


def total(values: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Add neighbours, then neighbouring sums, and so on. Zeros at the end keep the order."""
    dims = sorted(dim % values.dim() for dim in dims)
    kept = [dim for dim in range(values.dim()) if dim not in dims]
    work = wide(values).permute(*kept, *dims).flatten(len(kept))
    if not dims:  # A scalar, which `flatten` has given a dim of size 1.
        work = work.unsqueeze(-1) if work.dim() == values.dim() else work
    while (size := work.shape[-1]) > 1:
        work = F.pad(work, (0, size % 2))
        work = work[..., 0::2] + work[..., 1::2]
    work = work.squeeze(-1) if work.shape[-1] else work.new_zeros(work.shape[:-1])
    for dim in dims if keepdim else ():
        work = work.unsqueeze(dim)
    return work


def wide(values: Tensor) -> Tensor:
    """Return values in the dtype of sums: float32, or float64 for float64."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def pointwise(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Apply a function of single elements to whole vectors only.

    For elements that do not fill a vector, torch uses other code, in which the last bits of `silu`,
    `pow` and other functions differ. A thread's share, and so a part of a vector, may end anywhere.
    """
    shape = torch.broadcast_shapes(*(arg.shape for arg in args if _is_many(arg)))
    count = shape.numel()
    if not count or not any(map(_is_many, args)):
        return function(*args, **kwargs)
    flat = [
        F.pad(arg.expand(shape).reshape(-1), (0, -count % VECTOR)) if _is_many(arg) else arg
        for arg in args
    ]
    pieces = [
        function(*(arg[at : at + PIECE] if _is_many(arg) else arg for arg in flat), **kwargs)
        for at in range(0, count, PIECE)
    ]
    return torch.cat(pieces)[:count].view(shape)


def _is_many(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.dim() > 0


def _exponentials(values: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum, the values minus the maximum, and their exponentials."""
    work = wide(values)
    greatest = work.amax(tuple(dims), keepdim=True)
    left = work - torch.where(greatest == -torch.inf, 0.0, greatest)
    return greatest, left, pointwise(torch.exp, left)


def softmax(values: Tensor, dim: int) -> Tensor:
    _, _, each = _exponentials(values, (dim,))
    return each / total(each, (dim,), keepdim=True)


def log_softmax(values: Tensor, dim: int) -> Tensor:
    _, left, each = _exponentials(values, (dim,))
    return left - pointwise(torch.log, total(each, (dim,), keepdim=True))


def logsumexp(values: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    greatest, _, each = _exponentials(values, dims)
    found = greatest + pointwise(torch.log, total(each, dims, keepdim=True))
    return found if keepdim else found.squeeze(tuple(dims))
