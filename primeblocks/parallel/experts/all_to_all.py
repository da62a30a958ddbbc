"""Experts shared over a process group, rows sent by all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PlanError, UsageError, check_counts
from ...groups import Carried, all_to_all_rows, check_group, facts_of, outside_graphs, settle
from .dispatcher import (
    Dispatched,
    align,
    check_slots,
    checked_alignment,
    judge_slots,
    measure_slots,
    pad_rows,
    settle_outputs,
    sort_slots,
    unalign,
)
from .overlap import Meanwhile, overlapped_all_to_all
from .permute import RowMap, map_choices, map_rows, permute, regroup, spread, unpermute

__all__ = ["AllToAllDispatcher", "OncePerRankDispatcher"]

T = TypeVar("T")


class AllToAllDispatcher:
    """A dispatcher that sends one row for each slot: a token travels once for each expert it chose.

    Works on gloo and NCCL, with ragged and empty ranks. Collective: in dispatch the counts, those
    of each expert and the rows, in combine the rows; their backwards the rows once each. The host
    reads the counts once, or never with a capacity and without `check`.

    `dispatch` and `combine` take `meanwhile=`, such as a layer's shared experts: it is called once,
    while the rows travel, and differentiated while their gradients do.

    Args:
        group: the ranks that share the experts; rank r owns the r-th share.
        alignment: rows of each expert are padded with zeros to a multiple of this (fp8: 128); the
            last expert's with as many as may be needed, so that the host need not know.
        capacity_rows: the most rows that a rank sends to one rank, equal on all. As many travel,
            whatever was chosen, and their number is no news. More is an error: with `check` a
            PlanError on all ranks, without it an assertion of the device.
        check: look at the values of ids and scores, and agree on the layer before rows are sent, so
            that a mistake on one rank is an error on all and not a wait. In dispatch this travels
            with the counts; in combine it is one small collective, which the host reads.

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
        self._owners = _Owners(type(self).__name__, group, check, capacity_rows)
        self.group, self.alignment = group, checked_alignment(alignment)

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
        ranks, capacity = self.group.size(), self._owners.capacity_rows

        def count() -> tuple[Tensor, Tensor]:
            # Experts are dealt in order, so sorting by expert also sorts by owner.
            slots, counts = sort_slots(expert_ids.flatten(), num_experts=num_experts)
            return slots, counts.view(ranks, -1)

        slots, mine, splits = self._owners.admit(x, scores, expert_ids, num_experts, count, _rows)
        send, receive, arriving = splits.send, splits.receive, splits.arriving
        row_map = map_choices(slots, tokens=x.shape[0], top_k=expert_ids.shape[1])
        if arriving is None:
            arriving = self._owners.exchange(mine, [1] * ranks, [1] * ranks)
        counts = arriving.sum(0)
        if capacity is not None:
            row_map = spread(row_map, mine.sum(1), room=capacity)
            arriving = torch.cat((arriving, capacity - arriving.sum(1, keepdim=True)), dim=1)
        rows = self._owners.exchange(permute(x, row_map), send, receive, meanwhile)
        again = regroup(arriving, rows=len(rows))
        tokens, counts, places = _aligned(
            permute(rows, again), counts, self.alignment, exact=capacity is None
        )
        weights = scores.flatten()
        return Dispatched(tokens, counts, _Sent(weights, row_map, again, places, send, receive))

    @outside_graphs
    def combine(
        self, y: Tensor, dispatched: Dispatched, *, meanwhile: Meanwhile | None = None
    ) -> Tensor:
        self._owners.admit_back(y, dispatched)
        weights, row_map, again, places, send, receive = dispatched.handle
        rows = unpermute(unalign(y, places), again)
        rows = self._owners.exchange(rows, receive, send, meanwhile)
        return unpermute(rows, row_map, weights)


class OncePerRankDispatcher:
    """A dispatcher that sends a token once to each rank that owns experts it chose.

    The owner copies it for its experts and adds up their weighted outputs before they return, so
    at top-8 over two ranks a quarter of the bytes travel; ids and scores travel besides, 4 + 4 or 8
    bytes a choice. Otherwise as `AllToAllDispatcher`, with one collective more in dispatch
    (scores). Outputs are rounded to their dtype once more than there.

    Source: arXiv:2412.19437, section 3.2 (DeepSeek-V3 sends a token once to each node).
    """

    def __init__(self, group: dist.ProcessGroup, *, alignment: int = 1, check: bool = True) -> None:
        self._owners = _Owners(type(self).__name__, group, check, None)
        self.group, self.alignment = group, checked_alignment(alignment)

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
        ranks = self.group.size()

        def count() -> tuple[tuple[Tensor, Tensor], Tensor]:
            owner = torch.div(expert_ids, num_experts // ranks, rounding_mode="floor").long()
            # Values are looked at later: until then an id may be anything.
            owner = owner.clamp(0, ranks - 1)
            wanted = torch.zeros(len(x), ranks, dtype=torch.bool, device=x.device)
            wanted.scatter_(1, owner, True)
            choices = torch.zeros(ranks, dtype=torch.int64, device=x.device)
            choices.scatter_add_(0, owner.flatten(), torch.ones_like(owner).flatten())
            return (owner, wanted), torch.stack((wanted.sum(0), choices), dim=1)

        (owner, wanted), _, splits = self._owners.admit(x, scores, expert_ids, num_experts, count)
        send, receive, share = splits.send, splits.receive, num_experts // ranks
        # The pairs of a rank and a token that it gets, in this order.
        pairs = wanted.t().flatten().byte().argsort(descending=True, stable=True)[: sum(send)]
        target, token = pairs // max(len(x), 1), pairs % max(len(x), 1)
        row_map = map_rows(token, tokens=len(x))
        # A choice of another rank's expert travels as the number behind the last, without weight.
        here = owner[token] == target[:, None]
        ids = (expert_ids[token] - target[:, None] * share).masked_fill(~here, share)
        ids = self._owners.exchange(ids.to(torch.int32), send, receive)
        gates = self._owners.exchange(scores[token] * here, send, receive)
        rows = self._owners.exchange(permute(x, row_map), send, receive, meanwhile)
        slots, counts = sort_slots(ids.flatten(), num_experts=share)
        slots = slots[: splits.choices]
        again = map_rows(slots // max(ids.shape[1], 1), tokens=len(rows))
        arrived, counts, places = _aligned(permute(rows, again), counts, self.alignment, exact=True)
        weights = gates.flatten()[slots[again.rows]]
        return Dispatched(arrived, counts, _Sent(weights, row_map, again, places, send, receive))

    @outside_graphs
    def combine(
        self, y: Tensor, dispatched: Dispatched, *, meanwhile: Meanwhile | None = None
    ) -> Tensor:
        self._owners.admit_back(y, dispatched)
        weights, row_map, again, places, send, receive = dispatched.handle
        partial = unpermute(unalign(y, places), again, weights)
        return unpermute(self._owners.exchange(partial, receive, send, meanwhile), row_map)


class _Sent(NamedTuple):
    """Layout of a send: `row_map` of rows on the wire, `again` of arrived rows to experts."""

    weights: Tensor
    row_map: RowMap
    again: RowMap
    places: Tensor | None
    send: list[int]
    receive: list[int]


def _aligned(
    tokens: Tensor, counts: Tensor, alignment: int, *, exact: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pad to a number of rows that the host knows; the last expert takes the rest if `exact`."""
    if alignment == 1:
        return tokens, counts, None
    most = len(tokens) + min(len(counts), len(tokens)) * (alignment - 1)
    rows = (most if exact else most + alignment - 1) // alignment * alignment
    padded = pad_rows(counts, alignment)
    placed, places = align(tokens, counts, padded, rows=rows)
    if exact:
        padded[-1] += rows - padded.sum()
    return placed, padded, places


class _Splits(NamedTuple):
    """Rows to and from each rank, the choices that arrive with them if they were counted, and the
    numbers that ranks told this one if they were exchanged."""

    send: list[int]
    receive: list[int]
    choices: int
    arriving: Tensor | None


def _rows(counts: Tensor) -> Tensor:
    return counts.sum(1, keepdim=True)


def _as_it_is(counts: Tensor) -> Tensor:
    return counts


@dataclass(frozen=True)
class _Owners:
    """The ranks that share the experts, as one dispatcher talks with them."""

    dispatcher: str
    group: dist.ProcessGroup
    check: bool
    capacity_rows: int | None

    def __post_init__(self) -> None:
        check_group(self.group)
        if self.capacity_rows is not None:
            check_counts(capacity_rows=self.capacity_rows)

    def admit(
        self,
        x: Tensor,
        scores: Tensor,
        expert_ids: Tensor,
        num_experts: int,
        count: Callable[[], tuple[T, Tensor]],
        rows: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> tuple[T, Tensor, _Splits]:
        """Agree on a call, and on how many rows go where. Collective.

        Args:
            count: returns what its caller needs later, and `[ranks, ...]` counts.
            rows: makes of counts what the host needs: the rows of each rank, and in a second
                column, if there is one, the choices among them.
        """
        ranks, counted = self.group.size(), []

        def look() -> dict[str, object]:
            check_slots(x, scores, expert_ids, num_experts=num_experts, values=False)
            if num_experts % ranks:
                raise PlanError(
                    f"{num_experts} experts cannot be shared equally by {ranks} ranks. "
                    f"Plan with an expert degree that divides {num_experts}."
                )
            facts = {"num_experts": num_experts, "top_k": expert_ids.shape[1]}
            facts |= {"capacity_rows": self.capacity_rows or 0}
            return facts | facts_of("x", x) | facts_of("scores", scores)

        def judge(told: list[int]) -> UsageError | None:
            return judge_slots(told, num_experts, scores.numel()) or self._crowded(told[3:])

        def carry() -> Carried:
            counted.append(count())
            values = measure_slots(scores, expert_ids)
            return Carried(torch.cat((values, rows(counted[0][1]).t().flatten())), judge)

        call, operands = f"{self.dispatcher}.dispatch", (x, scores, expert_ids)
        told = settle(call, look, *operands, group=self.group, check=self.check, carry=carry)
        kept, counts = counted[0] if self.check else count()
        return kept, counts, self._splits([row[3:] for row in told], counts, rows)

    def _crowded(self, rows: list[int]) -> UsageError | None:
        most = max(rows[: self.group.size()], default=0)
        if self.capacity_rows is None or most <= self.capacity_rows:
            return None
        return PlanError(
            f"{most} rows go to one rank; capacity_rows is {self.capacity_rows}. Raise it, or "
            "leave it out: the host then reads the counts."
        )

    def _splits(
        self, told: list[list[int]], counts: Tensor, rows: Callable[[Tensor], Tensor]
    ) -> _Splits:
        """Take them from what all ranks told, or ask each for its own."""
        ranks, own, room = self.group.size(), self.group.rank(), self.capacity_rows
        if room is not None:
            if not self.check:
                torch._assert_async(rows(counts).max() <= room, f"over capacity_rows={room}")
            return _Splits([room] * ranks, [room] * ranks, 0, None)
        arriving = None
        if told:
            sent, theirs = told[own], [[row[own], *row[ranks + own :][:1]] for row in told]
        else:
            arriving = self.exchange(counts, [1] * ranks, [1] * ranks)
            both = torch.cat((rows(counts), rows(arriving))).tolist()
            sent, theirs = [pair[0] for pair in both[:ranks]], both[ranks:]
        choices = sum(each[-1] for each in theirs)
        return _Splits(sent[:ranks], [each[0] for each in theirs], choices, arriving)

    def admit_back(self, y: Tensor, dispatched: Dispatched) -> None:
        call = f"{self.dispatcher}.combine"
        settle_outputs(call, y, dispatched, group=self.group, check=self.check)

    def exchange(
        self,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        meanwhile: Meanwhile | None = None,
    ) -> Tensor:
        if meanwhile is not None:
            return overlapped_all_to_all(rows, send, receive, group=self.group, meanwhile=meanwhile)
        return all_to_all_rows(rows, send_counts=send, receive_counts=receive, group=self.group)
