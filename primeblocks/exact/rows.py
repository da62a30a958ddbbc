"""Operations in which every row has one order of additions. Local. On a CPU.

Sums and softmax are over the last dim, and are computed in float32 or wider. They return the dtype
of `values`, or `dtype`.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError

__all__ = [
    "ROWS",
    "grouped_matmul",
    "log_softmax",
    "matmul",
    "pointwise",
    "softmax",
    "total",
    "wide",
]

ROWS = 32  # of every product: a kernel chooses its order by the shape of its operands
COLUMNS = 16  # at least: below 12, MKL on an AMD EPYC chooses an order by a row's place
VECTOR = 64  # elements: two of the longest registers, of the shortest type
PIECE = 32768  # elements, too few for torch to split among threads

_proved: set[tuple[Any, ...]] = set()


def matmul(rows: Tensor, weight: Tensor) -> Tensor:
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
    return torch.cat([torch.mm(part, weight) for part in parts])[:count, :columns].contiguous()


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its weight. Rows after the last end are zero."""
    bounds = [0, *ends.tolist()]
    found = [
        matmul(rows[start:end], weight)
        for (start, end), weight in zip(pairwise(bounds), weights, strict=True)
    ]
    return torch.cat([*found, rows.new_zeros(len(rows) - bounds[-1], weights.shape[-1])])


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


def total(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Add neighbours, then neighbouring sums, and so on. Appended zeros keep this order."""
    work = wide(values)
    while (size := work.shape[-1]) > 1:
        work = F.pad(work, (0, size % 2))
        work = work[..., 0::2] + work[..., 1::2]
    work = work.squeeze(-1) if work.shape[-1] else work.new_zeros(work.shape[:-1])
    return work.to(dtype or values.dtype)


def wide(values: Tensor) -> Tensor:
    """Return values in the dtype of sums: float32, or float64 for float64."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def pointwise(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Apply a function of single elements, on a CPU to whole vectors only.

    For elements that do not fill a vector, torch uses other code on a CPU. The last bits of `silu`,
    `pow` and other functions then differ. A thread's share, and so a part of a vector, may end
    anywhere.
    """
    shape = torch.broadcast_shapes(*(arg.shape for arg in args if _is_many(arg)))
    count = shape.numel()
    on_cpu = all(arg.device.type == "cpu" for arg in args if isinstance(arg, Tensor))
    if not count or not on_cpu or not any(map(_is_many, args)):
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


def _exponentials(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values minus their maximum, and the exponentials of these differences."""
    work = wide(values)
    greatest = work.amax(-1, keepdim=True)
    left = work - torch.where(greatest == -torch.inf, 0.0, greatest)
    return left, pointwise(torch.exp, left)


def softmax(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    _, each = _exponentials(values)
    return (each / total(each)[..., None]).to(dtype or values.dtype)


def log_softmax(values: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    left, each = _exponentials(values)
    return (left - pointwise(torch.log, total(each)[..., None])).to(dtype or values.dtype)
