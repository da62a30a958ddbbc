"""The contract of dispatchers, which send rows to experts and back, and `LocalDispatcher`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from ...errors import ShapeError, UsageError, check_counts
from ...groups import agreed, check_tensors, facts_of
from .permute import map_choices, permute, unpermute

# torch lacks arithmetic for wider unsigned ids.
_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

__all__ = [
    "Dispatched",
    "LocalDispatcher",
    "SortedSlots",
    "TokenDispatcher",
    "agree_on_outputs",
    "align",
    "check_outputs",
    "check_slots",
    "judge_slots",
    "measure_slots",
    "pad_rows",
    "sort_slots",
    "unalign",
]


@dataclass(frozen=True)
class Dispatched:
    """The rows that arrived for the local experts.

    Attributes:
        tokens: one row per slot, grouped by local expert. The rows of an expert are ordered by
            source rank, then token, then choice, as if one rank had the whole batch. With an
            alignment, rows of zeros follow the rows of each expert.
        counts: the number of rows of each local expert, including rows of zeros, on the device of
            `tokens`. Without a capacity, the counts add up to the number of rows. With a capacity,
            `tokens` has additional rows at the end, which `combine` leaves out.
        handle: private data of the dispatcher, which `combine` needs.
    """

    tokens: Float[Tensor, "slots hidden"]
    counts: Int64[Tensor, " local_experts"]
    handle: Any

    @cached_property
    def offs(self) -> Int32[Tensor, " local_experts"]:
        """For each expert, the index after its last row.

        The tensor is on the device of `counts`, as grouped products need.
        """
        return self.counts.cumsum(0, dtype=torch.int32)


@runtime_checkable
class TokenDispatcher(Protocol):
    """The interface of dispatchers, which send tokens to experts and back.

    The backward of `dispatch` sends gradients from experts back to tokens, as `combine` sends rows.
    The backward of `combine` sends gradients from tokens to experts, as `dispatch` sends rows.
    """

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        """Send each token to the ranks that own its experts.

        Args:
            x: `[tokens, hidden]`, differentiable.
            scores: `[tokens, top_k]`, differentiable gate weights, which `combine` uses.
            expert_ids: `[tokens, top_k]`, integers in `[0, num_experts)`.
            num_experts: the number of experts in the whole layer. Each rank owns an equal,
                consecutive share of the experts.

        Raises:
            ShapeError: shapes, dtypes, ids or scores are wrong. No row was sent.
            PlanError: the ranks cannot share the experts equally, or differ in `num_experts`,
                `top_k`, widths, dtypes, or in whether gradients are needed.
            RankError: another rank refused its arguments.
        """
        ...

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return `[tokens, hidden]`, the sum of each token's expert outputs, weighted by scores.

        Args:
            y: `[slots, hidden]`, the experts' outputs for `dispatched.tokens`.

        Raises:
            ShapeError: `y` does not have one row for each dispatched row.
            PlanError: ranks differ in the width or dtype of `y`, or in whether gradients are
                needed.
            RankError: another rank refused its arguments.
        """
        ...


class LocalDispatcher:
    """A dispatcher for ranks that own all experts, which sorts rows without communication. Local.

    Args:
        alignment: the rows of each expert are padded with rows of zeros to a multiple of
            `alignment`. The FP8 kernel `DeepGemm` needs an alignment of 128.
        check: check the values of ids and scores. The host waits for this check. With
            `check=False`, values out of range give undefined results. The host then waits only if
            `alignment` is above 1, to read the number of rows.
    """

    def __init__(self, *, alignment: int = 1, check: bool = True) -> None:
        check_counts(alignment=alignment)
        self.alignment, self.check = alignment, check

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        check_slots(x, scores, expert_ids, num_experts=num_experts, values=False)
        ordered = sort_slots(expert_ids.flatten(), num_experts=num_experts)
        counts, rows = ordered.counts, expert_ids.numel()
        asked = [measure_slots(scores, expert_ids)] if self.check else []
        if self.alignment > 1:
            counts = pad_rows(counts, self.alignment)
            asked.append(counts.sum()[None])
        if asked:
            told = torch.cat(asked).tolist()
            problem = judge_slots(told, num_experts, scores.numel()) if self.check else None
            if problem is not None:
                raise problem
            rows = told[-1] if self.alignment > 1 else rows
        top_k = expert_ids.shape[1]
        row_map = map_choices(ordered.slots, tokens=x.shape[0], top_k=top_k)
        tokens = permute(x, row_map)
        places = None
        if self.alignment > 1:
            tokens, places = align(tokens, ordered.counts, counts, rows=rows)
        return Dispatched(tokens, counts, (scores.flatten(), row_map, places))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        check_outputs(y, dispatched)
        weights, row_map, places = dispatched.handle
        return unpermute(unalign(y, places), row_map, weights)


class SortedSlots(NamedTuple):
    """Slots sorted by expert, in a stable order."""

    slots: Int64[Tensor, " slots"]
    counts: Int64[Tensor, " experts"]


def sort_slots(expert_of_slot: Tensor, *, num_experts: int) -> SortedSlots:
    """Sort slots by expert. Slots whose id is above the last expert come last. Local."""
    small = torch.int16 if num_experts < 2**15 else torch.int64  # Radix sort: fewer passes.
    ordered, slots = expert_of_slot.to(small).sort(stable=True)
    experts = torch.arange(num_experts, dtype=small, device=slots.device)
    ends = torch.searchsorted(ordered, experts, right=True)
    return SortedSlots(slots, ends.diff(prepend=ends.new_zeros(1)))


def pad_rows(counts: Tensor, alignment: int) -> Tensor:
    """Round counts up to multiples of `alignment`."""
    return (counts + alignment - 1) // alignment * alignment


def align(tokens: Tensor, counts: Tensor, padded: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Pad each group of rows with zeros. Return `rows` rows, and each token's new place.

    Tokens after the last group stay after it.
    """
    shift = torch.cat((counts.new_zeros(1), (padded - counts).cumsum(0)))
    groups = torch.cat((counts, (len(tokens) - counts.sum())[None]))
    places = torch.arange(len(tokens), device=tokens.device)
    places = places + shift.repeat_interleave(groups, output_size=len(tokens))
    empty = tokens.new_zeros(rows, tokens.shape[1])
    return empty.index_copy(0, places, tokens), places


def unalign(y: Tensor, places: Tensor | None) -> Tensor:
    """Return the rows that are not padding."""
    return y if places is None else y.index_select(0, places)


def check_slots(
    x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int, values: bool
) -> None:
    """Refuse operands as `TokenDispatcher.dispatch` does. Local."""
    check_tensors(x=x, scores=scores, expert_ids=expert_ids)
    check_counts(num_experts=num_experts)
    if x.ndim != 2 or expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ShapeError(
            "dispatch needs x [tokens, hidden] and expert_ids [tokens, top_k]; got "
            f"{tuple(x.shape)} and {tuple(expert_ids.shape)}."
        )
    if scores.shape != expert_ids.shape:
        raise ShapeError(
            f"scores {tuple(scores.shape)} and expert_ids {tuple(expert_ids.shape)} differ. Pass "
            "one score per id."
        )
    if expert_ids.dtype not in _IDS:
        raise ShapeError(f"expert_ids must be integers, signed or uint8; got {expert_ids.dtype}.")
    if not x.is_floating_point() or not scores.is_floating_point():
        raise ShapeError(f"x and scores must be floating point; got {x.dtype}, {scores.dtype}.")
    if values:
        told = measure_slots(scores, expert_ids).tolist()
        problem = judge_slots(told, num_experts, scores.numel())
        if problem is not None:
            raise problem


def measure_slots(scores: Tensor, expert_ids: Tensor) -> Tensor:
    """Return the lowest id, the highest id and the count of non-finite scores. Local."""
    if expert_ids.numel() == 0:
        return torch.zeros(3, dtype=torch.int64, device=expert_ids.device)
    low, high = expert_ids.aminmax()
    bad = (~scores.detach().isfinite()).sum()
    return torch.stack((low.long(), high.long(), bad))


def judge_slots(told: list[int], num_experts: int, entries: int) -> UsageError | None:
    """Return the error that measured values call for, or None. Local."""
    low, high, bad = told[:3]
    if low < 0 or high >= num_experts:
        return ShapeError(
            f"expert_ids are between {low} and {high}, but the layer has experts 0 to "
            f"{num_experts - 1}."
        )
    if bad:
        return ShapeError(
            f"{bad} of {entries} scores are NaN or infinite. Check the router's input. Weights of "
            "a meta model are NaN until load_pretrained."
        )
    return None


def agree_on_outputs(
    name: str, y: Tensor, dispatched: Dispatched, *, group: dist.ProcessGroup, check: bool
) -> None:
    """Refuse outputs as `TokenDispatcher.combine` does. Collective if `check`. Else local."""
    with agreed(name, y, group=group, check=check) as call:
        check_outputs(y, dispatched)
        call.facts |= facts_of("y", y)


def check_outputs(y: Tensor, dispatched: Dispatched) -> None:
    """Raise ShapeError for outputs that do not fit the rows. Local."""
    check_tensors(y=y)
    if not isinstance(dispatched, Dispatched):
        raise ShapeError(
            f"combine needs the result of dispatch; got a {type(dispatched).__name__}."
        )
    if not y.is_floating_point():
        raise ShapeError(f"y must be floating point; got {y.dtype}.")
    if y.ndim != 2 or y.shape[0] != dispatched.tokens.shape[0]:
        raise ShapeError(
            f"combine needs one row for each of {dispatched.tokens.shape[0]} slots; "
            f"got {tuple(y.shape)}."
        )
