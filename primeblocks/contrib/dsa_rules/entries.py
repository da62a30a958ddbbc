"""Entries that pool or compress neighbouring tokens, over a sequence that ranks share.

A window is `ratio` tokens of one document, counted from its first token. Each complete window makes
an entry. If a window is split over ranks, the rank of its last token owns the entry and fetches the
other tokens. Everything is made of plans and plain tensors:

    entries = plan_entries(sequence, 4)
    tokens, present = windows(torch.cat([k, gate], -1), sequence=sequence, group=group, ratio=4)

    keys, gates = tokens.chunk(2, -1)
    pooled = gated_mean(keys, gates + bias, present)
    (whole,) = gather_tokens(pooled, sequence=entries, group=group)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PlanError, ShapeError
from ...groups import agreed, check_tensors, facts_of, outside_graphs
from ...parallel.attention.kernel import accumulator_dtype
from ...parallel.linear.convolution import Halo, find_halo
from ...parallel.orders import merge_pieces
from ...parallel.sequence import Run, SequencePlan, check_plan, kept_on_plan
from .ids import check_whole, first_entries

__all__ = ["gated_mean", "plan_entries", "tokens_and_entries", "windows"]


def plan_entries(sequence: SequencePlan, ratio: int) -> SequencePlan:
    """Plan the entries of all documents: one for each complete window of `ratio` tokens. Pure.

    The result is a plan like that of the tokens. `positions(rank) * ratio` gives the first position
    of each of the rank's windows, counted in its document. `gather_tokens` gathers the entries of
    all ranks in the order of the sequence. Left-over tokens at the end of a document make no entry.
    The rank that holds the last token of a window owns its entry.

    Raises:
        PlanError: `ratio` is not a whole number of at least 1.
    """
    check_whole(ratio=(ratio, 1))
    return _entries(sequence, int(ratio))


def tokens_and_entries(sequence: SequencePlan, entries: SequencePlan) -> SequencePlan:
    """Plan the rows of a layer that attends to tokens and to entries. Pure.

    Each rank holds its own tokens, followed by its own entries. The id of entry e is
    `sequence.tokens + e`. Pass the plan to `sparse_attention(..., entries=)` with
    `torch.cat([tokens, entries])`. Each gather and each reduce-scatter of gradients then moves
    tokens and entries together.

    Raises:
        PlanError: the two plans have different numbers of ranks.
    """
    if sequence.ranks != entries.ranks:
        raise PlanError(
            f"tokens are planned for {sequence.ranks} ranks, entries for {entries.ranks}. Make "
            "the entries with plan_entries(sequence, ratio)."
        )
    return _both(sequence, entries)


@outside_graphs
def windows(
    x: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    ratio: int,
    overlap: int = 0,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Collect the tokens of each window that this rank owns. Differentiable.

    Collective, and so is its backward: one exchange each. A rank receives at most
    `ratio - 1 + overlap` tokens of `x` per run. These are the tokens of a window that began before
    the run, and the `overlap` tokens before that window. No rank sends anything if no window is
    split between ranks. All ranks know this from the plan. Concatenate everything that you need of
    a token, so that there is only one exchange.

    Args:
        x: `[local_tokens, ...]`.
        sequence: the plan of the tokens.
        group: the ranks that share the sequence.
        ratio: tokens of a window.
        overlap: tokens before the window that are included. DeepSeek-V4's CSA includes the `ratio`
            tokens of the previous window.
        check: as in `ring_attention`.

    Returns:
        The tokens, `[own_entries, overlap + ratio, ...]`, in the order of
        `plan_entries(sequence, ratio)`. Then bool `[own_entries, overlap + ratio]`, which is False
        before the document begins. The tokens there are zeros.

    Raises:
        ShapeError: `x` does not hold this rank's tokens.
        PlanError: the group does not fit the plan, or `ratio` or `overlap` is out of range.
        PlanError: ranks differ in `ratio`, in `overlap`, in sizes or in whether they need
            gradients.
        RankError: another rank refused its arguments.
    """
    with agreed("windows", x, group=group, check=check) as call:
        check_plan(sequence, group)
        check_tensors(x=x)
        check_whole(ratio=(ratio, 1), overlap=(overlap, 0))
        sequence.check_tokens(group, x=x)
        sizes = {"plan": sequence.fingerprint, "ratio": ratio, "overlap": overlap}
        call.facts |= {**sizes, **facts_of("x", x)}
    table = _table(sequence, group.rank(), ratio, overlap, x.device)
    fetched = table.halo.fetch(x, group=group)
    found = fetched.index_select(0, table.rows.flatten())
    return found.view(*table.rows.shape, *x.shape[1:]), table.present.clone()


def gated_mean(values: Tensor, gates: Tensor, present: Tensor) -> Tensor:
    """Average each window's tokens, column by column, with the softmax of their gates. Local.

    Differentiable. The softmax is computed in float32, or in float64 for float64. The sum is
    computed in the dtype of `values`, as models do.

    Args:
        values: `[entries, window, dim]`.
        gates: the logits, in the shape of `values`. They include the term that the model adds for
            each place in the window.
        present: bool `[entries, window]`: tokens that count. Each window has at least one.

    Returns:
        `[entries, dim]`.

    Raises:
        ShapeError: the shapes do not fit each other.
    """
    if values.ndim != 3 or gates.shape != values.shape or present.shape != values.shape[:2]:
        raise ShapeError(
            "gated_mean needs values and gates [entries, window, dim] and present [entries, "
            f"window]; got {tuple(values.shape)}, {tuple(gates.shape)} and {tuple(present.shape)}."
        )
    logits = gates.to(accumulator_dtype(gates)).masked_fill(~present.unsqueeze(-1), -torch.inf)
    return (values * logits.softmax(1).to(values.dtype)).sum(1)


def _owned(run: Run, ratio: int) -> range:
    """Return the windows of the document whose last token the run holds."""
    return range((run.start - run.document) // ratio, (run.stop - run.document) // ratio)


# Cached, because every layer of a step needs the same plans and tables.
@kept_on_plan
def _entries(sequence: SequencePlan, ratio: int) -> SequencePlan:
    first = first_entries(sequence, ratio)
    pieces = []
    for rank in range(sequence.ranks):
        owned = ((first[run.document], _owned(run, ratio)) for run in sequence.runs(rank))
        pieces.append([(one + own.start, one + own.stop) for one, own in owned])
    lengths = tuple(length // ratio for length in sequence.document_lengths)
    return _plan(lengths, sequence.order, pieces)


@kept_on_plan
def _both(sequence: SequencePlan, entries: SequencePlan) -> SequencePlan:
    behind = sequence.tokens
    pieces = [
        [*tokens, *((behind + start, behind + stop) for start, stop in own)]
        for tokens, own in zip(sequence.pieces, entries.pieces, strict=True)
    ]
    lengths = (*sequence.document_lengths, *entries.document_lengths)
    return _plan(lengths, sequence.order, pieces)


def _plan(
    lengths: tuple[int, ...], order: str, pieces: list[list[tuple[int, int]]]
) -> SequencePlan:
    merged = tuple(merge_pieces(own) for own in pieces)
    costs = tuple(float(sum(stop - start for start, stop in own)) for own in merged)
    return SequencePlan(lengths, order, merged, costs)


@dataclass(frozen=True)
class _Table:
    """One rank's part of the exchange, the rows of its windows after it, and existing tokens."""

    halo: Halo
    rows: Tensor
    present: Tensor


@kept_on_plan
def _table(
    sequence: SequencePlan, rank: int, ratio: int, overlap: int, device: torch.device
) -> _Table:
    def first(run: Run) -> int:
        own = _owned(run, ratio)
        return max(run.document, run.document + own.start * ratio - overlap) if own else run.start

    halo = find_halo(sequence, rank, first, device=device)
    starts, documents = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for run in sequence.runs(rank):
        own = torch.tensor(_owned(run, ratio), dtype=torch.int64)
        starts.append(run.document + own * ratio)
        documents.append(torch.full_like(own, run.document))
    places = torch.cat(starts)[:, None] + torch.arange(-overlap, ratio)
    present = places >= torch.cat(documents)[:, None]
    rows = halo.rows(places.clamp_min(0)).masked_fill(~present, halo.zeros)
    return _Table(halo, rows.to(device), present.to(device))
