"""Entries that pool or compress neighbouring tokens of a sequence that is split over ranks.

A window is `ratio` neighbouring tokens of one document. The first window begins at the first token
of the document. Each complete window becomes one entry. If a window is split over ranks, the rank
with the last token of the window owns the entry and fetches the other tokens. An example:

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

from ...errors import PlanError, ShapeError, check_counts
from ...groups import agreed, check_tensors, facts_of, outside_graphs
from ...parallel.attention.kernel import accumulator_dtype
from ...parallel.linear.convolution import Halo, find_halo
from ...parallel.orders import merge_pieces
from ...parallel.sequence import Run, SequencePlan, check_plan, kept_on_plan
from .ids import first_entries

__all__ = ["gated_mean", "plan_entries", "tokens_and_entries", "windows"]


def plan_entries(sequence: SequencePlan, ratio: int) -> SequencePlan:
    """Plan the entries of all documents: one entry per complete window of `ratio` tokens. Pure.

    The result is a `SequencePlan` of entries instead of tokens. `positions(rank) * ratio` is the
    first position of each window of the rank, counted from the start of the window's document.
    `gather_tokens` gathers the entries of all ranks in the order of the sequence. An incomplete
    window at the end of a document does not become an entry. The rank with the last token of a
    window owns the entry.

    Raises:
        PlanError: `ratio` is not a whole number of at least 1.
    """
    check_counts(ratio=ratio)
    return _entries(sequence, int(ratio))


def tokens_and_entries(sequence: SequencePlan, entries: SequencePlan) -> SequencePlan:
    """Plan the rows of a layer that attends to tokens and to entries. Pure.

    The rows of each rank are its own tokens, followed by its own entries. The id of entry e is
    `sequence.tokens + e`. Pass the plan as `entries=` to `sparse_attention`, and
    `torch.cat([tokens, entries])` as `kv`. The joint plan lets each gather and each reduce-scatter
    of gradients move tokens and entries together.

    Raises:
        PlanError: `sequence` and `entries` have different numbers of ranks.
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

    Forward and backward are collective, with one exchange each. For each contiguous range of its
    tokens, a rank receives at most `ratio - 1 + overlap` tokens of `x`. The received tokens are the
    beginning of a split window and the `overlap` tokens before the window. If the plan shows that
    no rank needs tokens of another rank, all ranks skip the exchange. Concatenate all tensors that
    you need per token, so that one exchange sends all of them.

    Args:
        x: `[local_tokens, ...]`, this rank's tokens.
        sequence: the plan of the tokens.
        group: the ranks that share the sequence.
        ratio: the number of tokens per window.
        overlap: the number of tokens before each window that are collected too. DeepSeek-V4's CSA
            collects the `ratio` tokens of the previous window.
        check: as in `ring_attention`.

    Returns:
        The tokens `[own_entries, overlap + ratio, ...]`, in the order of `plan_entries(sequence,
        ratio)`, and a bool mask `[own_entries, overlap + ratio]`. If a position is before the start
        of the document, the mask is False and the values of the token are 0.

    Raises:
        ShapeError: the length of `x` is not the number of this rank's tokens.
        PlanError: the group does not fit the plan, or `ratio` or `overlap` is out of range.
        PlanError: ranks differ in `ratio`, in `overlap`, in sizes or in the need for gradients.
        RankError: another rank refused its arguments.
    """
    with agreed("windows", x, group=group, check=check) as call:
        check_plan(sequence, group)
        check_tensors(x=x)
        check_counts(ratio=ratio)
        check_counts(least=0, overlap=overlap)
        sequence.check_tokens(group, x=x)
        sizes = {"plan": sequence.fingerprint, "ratio": ratio, "overlap": overlap}
        call.facts |= {**sizes, **facts_of("x", x)}
    table = _table(sequence, group.rank(), ratio, overlap, x.device)
    fetched = table.halo.fetch(x, group=group)
    found = fetched.index_select(0, table.rows.flatten())
    return found.view(*table.rows.shape, *x.shape[1:]), table.present.clone()


def gated_mean(values: Tensor, gates: Tensor, present: Tensor) -> Tensor:
    """Average each window's tokens, column by column, weighted by the softmax of the gates. Local.

    Differentiable. The softmax is computed in float32, or in float64 if `gates` is float64. The sum
    is computed in the dtype of `values`, as in the published models.

    Args:
        values: `[entries, window, dim]`.
        gates: `[entries, window, dim]`, the logits. The logits include the term that the model adds
            per position in the window.
        present: bool `[entries, window]`, True for the tokens to average. Each window needs at
            least one True.

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
