"""Ids of rows by query, as canonical lists: ascending, without gaps, followed by -1."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ShapeError
from ...parallel.sequence import SequencePlan, kept_on_plan

__all__ = [
    "Queries",
    "check_operands",
    "first_entries",
    "join_ids",
    "queries_of",
    "spread",
    "stretch",
]


# Bytes: two lists in int32, a place in int64, and another while it is made.
_BYTES_OF_AN_ID = 32


class Queries(NamedTuple):
    """Numbers of each query of a rank, int32 `[queries, 1]`.

    `place` is its place in the whole sequence. `document` is the first token of its document, and
    `first_entry` the document's first entry.
    """

    place: Tensor
    document: Tensor
    first_entry: Tensor

    @property
    def position(self) -> Tensor:
        return self.place - self.document

    def begun(self, size: int) -> Tensor:
        """Count the document's tokens in pieces of `size` that are complete at the query."""
        return (self.position + 1).div(size, rounding_mode="floor") * size

    def chunks(self, columns: int, chunk_bytes: int) -> Iterator[tuple[slice, Queries]]:
        """Cut queries into chunks whose lists of `columns` ids fit in `chunk_bytes`."""
        step = max(1, chunk_bytes // (_BYTES_OF_AN_ID * max(1, columns)))
        for start in range(0, len(self.place), step):
            rows = slice(start, start + step)
            yield rows, Queries(*(x[rows] for x in self))


# Cached on the device for every layer of a step, because a copy would make the host wait.
@kept_on_plan
def queries_of(sequence: SequencePlan, rank: int, ratio: int, device: torch.device) -> Queries:
    """Return the queries of a rank, for entries of `ratio` tokens. Local."""
    first = first_entries(sequence, ratio)
    runs = sequence.runs(rank)
    lengths = torch.tensor([run.stop - run.start for run in runs], dtype=torch.int64)
    entries = torch.tensor([first[run.document] for run in runs], dtype=torch.int64)
    found = (
        sequence.indices(rank),
        sequence.document_starts(rank),
        entries.repeat_interleave(lengths),
    )
    return Queries(*(x.to(torch.int32).to(device).unsqueeze(1) for x in found))


def first_entries(sequence: SequencePlan, ratio: int) -> dict[int, int]:
    """Map the place of each document's first token to the document's first entry. Pure."""
    lengths = sequence.document_lengths
    starts = accumulate(lengths[:-1], initial=0)
    first = accumulate((length // ratio for length in lengths[:-1]), initial=0)
    # An empty document begins at the same place as the next one, and has no entry.
    return dict(zip(starts, first, strict=True))


def spread(ids: Tensor, first: Tensor, document: Tensor, size: int) -> Tensor:
    """Return the tokens of pieces, `[queries, ids * size]`. `first` is the document's first id."""
    within = torch.arange(size, dtype=torch.int32, device=ids.device)
    tokens = ((ids - first) * size + document).unsqueeze(2) + within
    return tokens.masked_fill_(ids.unsqueeze(2) < 0, -1).flatten(1)


def stretch(some: Queries, start: Tensor, most: int) -> Tensor:
    """Return `[queries, most]`: tokens from position `start` of the document up to the query."""
    steps = torch.arange(most, dtype=torch.int32, device=start.device)
    tokens = some.document + start + steps
    return tokens.masked_fill_(tokens > some.place, -1)


def join_ids(one: Tensor, other: Tensor) -> Tensor:
    """Return the ids of `one` and then those of `other`, without the -1 in between."""
    both = torch.cat([one, other], dim=1)
    places = torch.arange(both.shape[1], device=both.device)
    count = (one >= 0).sum(1, keepdim=True)
    source = torch.where(places < count, places, places - count + one.shape[1])
    return F.pad(both, (0, 1), value=-1).gather(1, source.clamp_max_(both.shape[1]))


def check_operands(
    q: Tensor, weights: Tensor, keys: Tensor, *, tokens: int, candidates: int, what: str
) -> None:
    """Refuse operands that do not fit each other, or are not this rank's part. Local.

    Raises:
        ShapeError: a shape does not fit.
    """
    fit = q.ndim == 3 and weights.shape == q.shape[:2] and keys.shape == (candidates, q.shape[2])
    if not fit or q.shape[0] != tokens:
        raise ShapeError(
            f"this rank's {tokens} tokens and the {candidates} {what} of all ranks need q "
            f"[{tokens}, heads, dim], weights [{tokens}, heads] and keys [{candidates}, dim]; got "
            f"{tuple(q.shape)}, {tuple(weights.shape)} and {tuple(keys.shape)}. Gather keys by the "
            "plan of their rows."
        )
