"""Dispatchers for experts that a process group shares. They send rows by all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import PlanError, UsageError, check_counts
from ...groups import agreed, all_to_all_rows, check_group, facts_of, outside_graphs
from .dispatcher import (
    Dispatched,
    agree_on_outputs,
    align,
    check_slots,
    judge_slots,
    measure_slots,
    pad_rows,
    sort_slots,
    unalign,
)
from .permute import RowMap, map_choices, map_rows, permute, regroup, spread, unpermute

__all__ = ["AllToAllDispatcher", "Meanwhile", "OncePerRankDispatcher"]

Meanwhile = Callable[[], object]
"""Work to be done while rows travel. Its result is not used."""


class AllToAllDispatcher:
    """A dispatcher that sends one row per slot, so a token is sent once for each of its experts.

    The dispatcher works on gloo and NCCL. Ranks may have different numbers of tokens, also zero.

    `dispatch` and `combine` are collective. `dispatch` exchanges the counts of each expert, and
    then the rows. `combine` exchanges the rows. With `check=True`, both calls make one more
    exchange, which checks their arguments. The backward of each call exchanges rows once. The host
    reads counts once per dispatch, or never if you pass `capacity_rows` and `check=False`.

    The argument `meanwhile=` of `dispatch` is a function, such as a layer's shared experts.
    `dispatch` calls `meanwhile` once, during the exchange of rows. The backward of `meanwhile` runs
    during the exchange of the rows' gradients.

    Args:
        group: the ranks that share the experts. Rank r owns the r-th share of the experts.
        alignment: the rows of each expert are padded with rows of zeros to a multiple of
            `alignment`. The FP8 kernel `DeepGemm` needs an alignment of 128. With an alignment
            above 1, the dispatcher always allocates the maximum number of rows that padding can
            need. Therefore the host need not read the padded counts. Without
            `capacity_rows`, unneeded rows of zeros count as rows of the last expert.
        capacity_rows: the maximum number of rows that a rank sends to one rank, equal on all ranks.
            Each rank always sends `capacity_rows` rows to each rank, so the host need not read
            counts. If a rank has more than `capacity_rows` rows for one rank, `dispatch` raises
            PlanError on the sending rank, and RankError on the other ranks. With `check=False`, an
            assertion on the device fails instead.
        check: before rows are sent, check the values of ids and scores, and compare sizes and
            dtypes on all ranks. With `check=True`, a mistake on one rank raises an error on all
            ranks instead of hanging. In `dispatch`, the check also sends the number of rows for
            each rank. In `combine`, the check is one small collective. The host reads the results
            of the checks.

    Raises:
        PlanError: this rank is not in the group, or the alignment or the capacity is below 1.

    Source: arXiv:2006.16668 (GShard).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        alignment: int = 1,
        capacity_rows: int | None = None,
        check: bool = True,
    ) -> None:
        check_group(group)
        check_counts(alignment=alignment)
        if capacity_rows is not None:
            check_counts(capacity_rows=capacity_rows)
        self.group, self.alignment = group, alignment
        self.capacity_rows, self.check = capacity_rows, check

    @outside_graphs
    def dispatch(
        self,
        x: Tensor,
        scores: Tensor,
        expert_ids: Tensor,
        *,
        num_experts: int,
        meanwhile: Meanwhile | None = None,
    ) -> Dispatched:
        group, ranks, capacity = self.group, self.group.size(), self.capacity_rows
        name = "AllToAllDispatcher.dispatch"
        with agreed(name, x, scores, expert_ids, group=group, check=self.check) as call:
            call.facts |= _checked_facts(x, scores, expert_ids, num_experts, ranks)
            call.facts["capacity_rows"] = capacity
            # Experts are assigned in order, so sorting by expert also sorts by owner.
            slots, of_experts = sort_slots(expert_ids.flatten(), num_experts=num_experts)
            leaving = of_experts.view(ranks, -1)
            if self.check:
                call.numbers = torch.cat((measure_slots(scores, expert_ids), leaving.sum(1)))
                call.judge = lambda told: (
                    judge_slots(told, num_experts, scores.numel()) or self._crowded(told[3:])
                )
        row_map = map_choices(slots, tokens=x.shape[0], top_k=expert_ids.shape[1])
        each = [1] * ranks
        arriving = _exchange(leaving, each, each, group)
        if capacity is not None:
            send = receive = [capacity] * ranks
            if not self.check:
                crowded = f"over capacity_rows={capacity}"
                torch._assert_async(leaving.sum(1).max() <= capacity, crowded)
        elif self.check:
            send = call.told[group.rank()][3 : 3 + ranks]
            receive = [row[3 + group.rank()] for row in call.told]
        else:
            send, receive = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
        counts = arriving.sum(0)
        if capacity is not None:
            row_map = spread(row_map, leaving.sum(1), room=capacity)
            arriving = torch.cat((arriving, capacity - arriving.sum(1, keepdim=True)), dim=1)
        rows = _exchange(permute(x, row_map), send, receive, group, meanwhile)
        again = regroup(arriving, rows=len(rows))
        tokens, counts, places = _aligned(
            permute(rows, again), counts, self.alignment, exact=capacity is None
        )
        weights = scores.flatten()
        return Dispatched(tokens, counts, _Sent(weights, row_map, again, places, send, receive))

    @outside_graphs
    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        name = "AllToAllDispatcher.combine"
        agree_on_outputs(name, y, dispatched, group=self.group, check=self.check)
        weights, row_map, again, places, send, receive = dispatched.handle
        rows = unpermute(unalign(y, places), again)
        rows = _exchange(rows, receive, send, self.group)
        return unpermute(rows, row_map, weights)

    def _crowded(self, rows: list[int]) -> UsageError | None:
        most = max(rows[: self.group.size()])
        if self.capacity_rows is None or most <= self.capacity_rows:
            return None
        return PlanError(
            f"{most} rows go to one rank, but capacity_rows is {self.capacity_rows}. Raise "
            "capacity_rows, or leave it out so that the host reads the counts."
        )


class OncePerRankDispatcher:
    """A dispatcher that sends a token once to each rank that owns some of its experts.

    The receiving rank copies the token for its experts, and sends back the sum of the experts'
    weighted outputs. With top-8 over two ranks, the rows have at most a quarter of the bytes that
    `AllToAllDispatcher` sends. With each row, the dispatcher sends `top_k` ids of 4 bytes and
    `top_k` scores in their own dtype.

    The dispatcher does not support a capacity. `dispatch` makes four exchanges: the counts, the
    ids, the scores, and the rows. With `check=True`, the exchange of the counts also contains the
    check. Outputs are rounded to their dtype one time more than with `AllToAllDispatcher`.
    Everything else works as in `AllToAllDispatcher`.

    Source: arXiv:2412.19437, section 3.2 (DeepSeek-V3 sends a token once to each node).
    """

    def __init__(self, group: dist.ProcessGroup, *, alignment: int = 1, check: bool = True) -> None:
        check_group(group)
        check_counts(alignment=alignment)
        self.group, self.alignment, self.check = group, alignment, check

    @outside_graphs
    def dispatch(
        self,
        x: Tensor,
        scores: Tensor,
        expert_ids: Tensor,
        *,
        num_experts: int,
        meanwhile: Meanwhile | None = None,
    ) -> Dispatched:
        group, ranks = self.group, self.group.size()
        name = "OncePerRankDispatcher.dispatch"
        with agreed(name, x, scores, expert_ids, group=group, check=self.check) as call:
            call.facts |= _checked_facts(x, scores, expert_ids, num_experts, ranks)
            share = num_experts // ranks
            owner = expert_ids.long() // share
            # Values are checked later. Until then an id may be anything.
            owner = owner.clamp(0, ranks - 1)
            wanted = torch.zeros(len(x), ranks, dtype=torch.bool, device=x.device)
            wanted.scatter_(1, owner, True)
            choices = torch.zeros(ranks, dtype=torch.int64, device=x.device)
            choices.scatter_add_(0, owner.flatten(), torch.ones_like(owner).flatten())
            leaving = torch.stack((wanted.sum(0), choices))
            if self.check:
                call.numbers = torch.cat((measure_slots(scores, expert_ids), leaving.flatten()))
                call.judge = lambda told: judge_slots(told, num_experts, scores.numel())
        if self.check:
            send = call.told[group.rank()][3 : 3 + ranks]
            receive, arriving_choices = (
                [row[at + group.rank()] for row in call.told] for at in (3, 3 + ranks)
            )
        else:
            each = [1] * ranks
            arriving = _exchange(leaving.t(), each, each, group)
            send, _, receive, arriving_choices = torch.cat((leaving, arriving.t())).tolist()
        # The pairs of a rank and a token that it receives, sorted by rank, then by token.
        pairs = wanted.t().flatten().byte().argsort(descending=True, stable=True)[: sum(send)]
        target, token = pairs // max(len(x), 1), pairs % max(len(x), 1)
        row_map = map_rows(token, tokens=len(x))
        # A choice of another rank's expert travels as the id after the last one, with a score of 0.
        here = owner[token] == target[:, None]
        ids = (expert_ids[token] - target[:, None] * share).masked_fill(~here, share)
        ids = _exchange(ids.to(torch.int32), send, receive, group)
        gates = _exchange(scores[token] * here, send, receive, group)
        rows = _exchange(permute(x, row_map), send, receive, group, meanwhile)
        slots, counts = sort_slots(ids.flatten(), num_experts=share)
        slots = slots[: sum(arriving_choices)]
        again = map_rows(slots // max(ids.shape[1], 1), tokens=len(rows))
        arrived, counts, places = _aligned(permute(rows, again), counts, self.alignment, exact=True)
        weights = gates.flatten()[slots[again.rows]]
        return Dispatched(arrived, counts, _Sent(weights, row_map, again, places, send, receive))

    @outside_graphs
    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        name = "OncePerRankDispatcher.combine"
        agree_on_outputs(name, y, dispatched, group=self.group, check=self.check)
        weights, row_map, again, places, send, receive = dispatched.handle
        partial = unpermute(unalign(y, places), again, weights)
        return unpermute(_exchange(partial, receive, send, self.group), row_map)


class _Sent(NamedTuple):
    """Maps of a send: `row_map` gives the sent rows, `again` regroups arrived rows by expert."""

    weights: Tensor
    row_map: RowMap
    again: RowMap
    places: Tensor | None
    send: list[int]
    receive: list[int]


def _aligned(
    tokens: Tensor, counts: Tensor, alignment: int, *, exact: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pad to a number of rows that the host knows. The last expert gets the rest if `exact`."""
    if alignment == 1:
        return tokens, counts, None
    most = len(tokens) + min(len(counts), len(tokens)) * (alignment - 1)
    rows = (most if exact else most + alignment - 1) // alignment * alignment
    padded = pad_rows(counts, alignment)
    placed, places = align(tokens, counts, padded, rows=rows)
    if exact:
        padded[-1] += rows - padded.sum()
    return placed, padded, places


def _checked_facts(
    x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int, ranks: int
) -> dict[str, object]:
    """Check this rank's arguments, and return the facts that must be equal on all ranks. Local."""
    check_slots(x, scores, expert_ids, num_experts=num_experts, values=False)
    if num_experts % ranks:
        raise PlanError(
            f"{num_experts} experts cannot be shared equally by {ranks} ranks. "
            f"Plan with an expert degree that divides {num_experts}."
        )
    facts = {"num_experts": num_experts, "top_k": expert_ids.shape[1]}
    return facts | facts_of("x", x) | facts_of("scores", scores)


def _exchange(
    rows: Tensor,
    send: list[int],
    receive: list[int],
    group: dist.ProcessGroup,
    meanwhile: Meanwhile | None = None,
) -> Tensor:
    """Send rows as `all_to_all_rows` does, and call `meanwhile` before waiting for arriving rows.

    The backward of `meanwhile` runs while the gradients of the rows travel back, because autograd
    first runs the newest node that is ready. With `meanwhile`, differentiable only once.
    """
    if meanwhile is None:
        return all_to_all_rows(rows, send_counts=send, receive_counts=receive, group=group)
    flights: list[_Flight] = []
    start = _Start.apply(rows, flights, send, receive, group)
    try:
        meanwhile()
    except BaseException:
        flights.pop().land()  # Wait, because the memory of the rows will be used again.
        raise
    return _Land.apply(start, flights, send, receive, group)


class _Flight:
    """Rows that travel. Keeps sent rows alive, and arriving rows unread until all have arrived."""

    def __init__(
        self, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> None:
        self._sent = rows.contiguous()
        self._arriving = rows.new_empty(sum(receive), *rows.shape[1:])
        # gloo refuses float8, so tensors with one byte per element travel as bytes.
        raw = torch.uint8 if rows.dtype.itemsize == 1 else rows.dtype
        out, given = self._arriving.view(raw), self._sent.view(raw)
        self._work = dist.all_to_all_single(out, given, receive, send, group=group, async_op=True)

    def land(self) -> Tensor:
        self._work.wait()
        return self._arriving


class _Start(torch.autograd.Function):
    """The first half of an exchange, and the second half of its backward.

    Rows in flight bypass autograd, which might read gradients before they arrive. An empty tensor
    connects the two halves instead.
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
