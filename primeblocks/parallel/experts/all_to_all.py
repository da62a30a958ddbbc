"""Experts shared over a process group, rows sent by all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PlanError
from ...groups import all_to_all_rows, check_group, facts_of, outside_graphs, settle
from .dispatcher import (
    Dispatched,
    align,
    check_slots,
    checked_alignment,
    settle_outputs,
    sort_slots,
    unalign,
)
from .permute import RowMap, map_rows, permute, unpermute

__all__ = ["AllToAllDispatcher", "OncePerRankDispatcher"]


class AllToAllDispatcher:
    """A dispatcher that sends one row for each slot: a token travels once for each expert it chose.

    Works on gloo and NCCL, with ragged and empty ranks. Collective: in dispatch the counts and
    the rows, in combine the rows; their backwards the rows once each. The host waits for the
    counts once.

    Args:
        group: the ranks that share the experts; rank r owns the r-th share.
        alignment: rows of each expert are padded with zeros to a multiple of this (fp8: 128).
        check: look at the values of ids and scores, and agree on the layer before anything is
            sent, so that a mistake on one rank is an error on all and not a wait. One small
            collective more, for which the host waits.

    Raises:
        PlanError: this rank is not in the group, or the alignment is below 1.

    Source: arXiv:2006.16668 (GShard).
    """

    def __init__(self, group: dist.ProcessGroup, *, alignment: int = 1, check: bool = True) -> None:
        self._owners = _Owners(type(self).__name__, group, check)
        self.group, self.alignment = group, checked_alignment(alignment)

    @outside_graphs
    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        share = self._owners.admit(x, scores, expert_ids, num_experts)
        ranks, top_k = self.group.size(), expert_ids.shape[1]
        # Experts are dealt in order, so sorting by expert also sorts by owner.
        ordered = sort_slots(expert_ids.flatten(), num_experts=num_experts)
        row_map = map_rows(ordered.slots // top_k, tokens=x.shape[0])
        mine = ordered.counts.view(ranks, share).to(x.device)
        arriving = self._owners.exchange(mine, [1] * ranks, [1] * ranks).cpu()
        send, receive = ordered.counts.view(ranks, share).sum(1).tolist(), arriving.sum(1).tolist()
        rows = self._owners.exchange(permute(x, row_map), send, receive)
        # What arrived is ordered by (source, expert); the experts want (expert, source).
        local = torch.arange(share).repeat(ranks).repeat_interleave(arriving.flatten())
        by_expert = sort_slots(local.to(x.device), num_experts=share)
        again = map_rows(by_expert.slots, tokens=len(rows))
        tokens, counts, places = align(permute(rows, again), by_expert.counts, self.alignment)
        weights = scores.flatten()[ordered.slots[row_map.rows]]
        return Dispatched(tokens, counts, _Sent(weights, row_map, again, places, send, receive))

    @outside_graphs
    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        self._owners.admit_back(y, dispatched)
        weights, row_map, again, places, send, receive = dispatched.handle
        rows = self._owners.exchange(unpermute(unalign(y, places), again), receive, send)
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
        self._owners = _Owners(type(self).__name__, group, check)
        self.group, self.alignment = group, checked_alignment(alignment)

    @outside_graphs
    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        share = self._owners.admit(x, scores, expert_ids, num_experts)
        ranks, tokens = self.group.size(), x.shape[0]
        owner = torch.div(expert_ids, share, rounding_mode="floor").long()
        wanted = torch.zeros(ranks, tokens, dtype=torch.bool, device=x.device)
        wanted.t().scatter_(1, owner, True)
        target, token = wanted.nonzero(as_tuple=True)
        row_map = map_rows(token, tokens=tokens)
        sent = wanted.sum(1)[:, None]
        receive = self._owners.exchange(sent, [1] * ranks, [1] * ranks).flatten().tolist()
        send = sent.flatten().tolist()
        # A choice of another rank's expert travels as -1, and without weight.
        here = owner[token] == target[:, None]
        ids = (expert_ids[token] - target[:, None] * share).masked_fill(~here, -1)
        ids = self._owners.exchange(ids.to(torch.int32), send, receive)
        gates = self._owners.exchange(scores[token] * here, send, receive)
        rows = self._owners.exchange(permute(x, row_map), send, receive)
        row, choice = (ids >= 0).nonzero(as_tuple=True)
        ordered = sort_slots(ids[row, choice].long(), num_experts=share)
        again = map_rows(row[ordered.slots], tokens=len(rows))
        arrived, counts, places = align(permute(rows, again), ordered.counts, self.alignment)
        weights = gates[row, choice][ordered.slots[again.rows]]
        return Dispatched(arrived, counts, _Sent(weights, row_map, again, places, send, receive))

    @outside_graphs
    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        self._owners.admit_back(y, dispatched)
        weights, row_map, again, places, send, receive = dispatched.handle
        partial = unpermute(unalign(y, places), again, weights)
        return unpermute(self._owners.exchange(partial, receive, send), row_map)


class _Sent(NamedTuple):
    """Layout of a send: `row_map` of rows on the wire, `again` of arrived rows to experts."""

    weights: Tensor
    row_map: RowMap
    again: RowMap
    places: Tensor | None
    send: list[int]
    receive: list[int]


@dataclass(frozen=True)
class _Owners:
    """The ranks that share the experts, as one dispatcher talks with them."""

    dispatcher: str
    group: dist.ProcessGroup
    check: bool

    def __post_init__(self) -> None:
        check_group(self.group)

    def admit(self, x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int) -> int:
        """Return the experts of one rank. Collective if `check`."""
        ranks = self.group.size()

        def look() -> dict[str, object]:
            check_slots(x, scores, expert_ids, num_experts=num_experts, values=self.check)
            if num_experts % ranks:
                raise PlanError(
                    f"{num_experts} experts cannot be shared equally by {ranks} ranks. "
                    f"Plan with an expert degree that divides {num_experts}."
                )
            facts = {"num_experts": num_experts, "top_k": expert_ids.shape[1]}
            return facts | facts_of("x", x) | facts_of("scores", scores)

        call = f"{self.dispatcher}.dispatch"
        settle(call, look, x, scores, expert_ids, group=self.group, check=self.check)
        return num_experts // ranks

    def admit_back(self, y: Tensor, dispatched: Dispatched) -> None:
        call = f"{self.dispatcher}.combine"
        settle_outputs(call, y, dispatched, group=self.group, check=self.check)

    def exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return all_to_all_rows(rows, send_counts=send, receive_counts=receive, group=self.group)
