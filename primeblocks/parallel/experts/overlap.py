"""An exchange of rows with work between its two halves, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Meanwhile", "overlapped_all_to_all"]

Meanwhile = Callable[[], object]
"""Work to be done while rows travel; what it makes is its own affair."""


def overlapped_all_to_all(
    rows: Tensor,
    send: list[int],
    receive: list[int],
    *,
    group: dist.ProcessGroup,
    meanwhile: Meanwhile,
) -> Tensor:
    """Send rows as `all_to_all_rows` does, and call `meanwhile` before waiting for those of others.

    What it computes is differentiated while the gradients of the rows travel back, for autograd
    runs the latest of the nodes that are ready first. Collective, and so is its backward;
    differentiable once.
    """
    flights: list[_Flight] = []
    start = _Start.apply(rows, flights, send, receive, group)
    try:
        meanwhile()
    except BaseException:
        flights.pop().land()  # Before its memory is used again.
        raise
    return _Land.apply(start, flights, send, receive, group)


class _Flight:
    """Rows on their way: what is sent stays alive, and what arrives unread, until they land."""

    def __init__(
        self, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> None:
        self._sent = rows.contiguous()
        self._arriving = rows.new_empty(sum(receive), *rows.shape[1:])
        # gloo refuses float8: what has one byte an element travels as bytes.
        raw = torch.uint8 if rows.dtype.itemsize == 1 else rows.dtype
        out, given = self._arriving.view(raw), self._sent.view(raw)
        self._work = dist.all_to_all_single(out, given, receive, send, group=group, async_op=True)

    def land(self) -> Tensor:
        self._work.wait()
        return self._arriving


class _Start(torch.autograd.Function):
    """The first half of an exchange, and the second half of its backward.

    Flights pass beside autograd, which might read gradients that have not arrived. An empty tensor
    goes from half to half in their place.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flights: list[_Flight], *way: Any) -> Tensor:
        ctx.flights = flights
        flights.append(_Flight(rows, *way))
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return ctx.flights.pop().land(), None, None, None, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, flights: list[_Flight], *way: Any) -> Tensor:
        send, receive, group = way
        ctx.flights, ctx.way_back = flights, (receive, send, group)
        return flights.pop().land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        ctx.flights.append(_Flight(grads[0], *ctx.way_back))
        return grads[0].new_empty(0), None, None, None, None
