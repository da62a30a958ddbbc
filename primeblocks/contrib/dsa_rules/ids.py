"""Ids of rows by query: canonical lists, ascending, without gaps, -1 behind the last one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import PlanError, ShapeError
from ...parallel.sequence import SequencePlan, kept_on_plan

__all__ = [
    "Queries",
    "check_operands",
    "check_whole",
    "first_entries",
    "join_ids",
    "queries_of",
    "spread",
    "stretch",
]


# Two lists in int32, a place in int64, and another while it is made.
_BYTES_OF_AN_ID = 32


class Queries(NamedTuple):
    """Numbers of each query of a rank, `[queries, 1]`, int32.

    Its place in the whole sequence, and the first token and the first entry of its document.
    """

    place: Tensor
    document: Tensor
    first_entry: Tensor

    @property
    def position(self) -> Tensor:
        return self.place - self.document

    def begun(self, size: int) -> Tensor:
        """Tokens of its document up to it that make whole pieces of `size`."""
        return (self.position + 1).div(size, rounding_mode="floor") * size

    def chunks(self, columns: int, chunk_bytes: int) -> Iterator[tuple[slice, Queries]]:
        """Cut queries so that the tables of lists that are `columns` wide fit."""
        step = max(1, chunk_bytes // (_BYTES_OF_AN_ID * max(1, columns)))
        for start in range(0, len(self.place), step):
            rows = slice(start, start + step)
            yield rows, Queries(*(x[rows] for x in self))


# On the device, where every layer of a step asks for the same: a copy would make the host wait.
@kept_on_plan
def queries_of(sequence: SequencePlan, rank: int, ratio: int, device: torch.device) -> Queries:
    """Return the queries of a rank, and entries of `ratio` tokens. Local."""
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
    """By the place of a document's first token: its first entry. Pure."""
    lengths = sequence.document_lengths
    starts = accumulate(lengths[:-1], initial=0)
    first = accumulate((length // ratio for length in lengths[:-1]), initial=0)
    # An empty document begins where the next one does, and has no entry.
    return dict(zip(starts, first, strict=True))


def spread(ids: Tensor, first: Tensor, document: Tensor, size: int) -> Tensor:
    """`[queries, ids * size]`: the tokens of pieces; `first` is that of the document's start."""
    within = torch.arange(size, dtype=torch.int32, device=ids.device)
    tokens = ((ids - first) * size + document).unsqueeze(2) + within
    return tokens.masked_fill_(ids.unsqueeze(2) < 0, -1).flatten(1)


def stretch(some: Queries, start: Tensor, most: int) -> Tensor:
    """`[queries, most]`: tokens from position `start` of the document up to the query."""
    steps = torch.arange(most, dtype=torch.int32, device=start.device)
    tokens = some.document + start + steps
    return tokens.masked_fill_(tokens > some.place, -1)


def join_ids(one: Tensor, other: Tensor) -> Tensor:
    """Ids of `one`, and those of `other` behind them, without the gap."""
    both = torch.cat([one, other], dim=1)
    places = torch.arange(both.shape[1], device=both.device)
    count = (one >= 0).sum(1, keepdim=True)
    source = torch.where(places < count, places, places - count + one.shape[1])
    return F.pad(both, (0, 1), value=-1).gather(1, source.clamp_max_(both.shape[1]))


def check_operands(
    q: Tensor, weights: Tensor, keys: Tensor, *, tokens: int, candidates: int, what: str
) -> None:
    """Refuse what does not fit together, or is not this rank's part. Local.

    Raises:
        ShapeError: with the shapes.
    """
    fit = q.ndim == 3 and weights.shape == q.shape[:2] and keys.shape == (candidates, q.shape[2])
    if not fit or q.shape[0] != tokens:
        raise ShapeError(
            f"this rank's {tokens} tokens and the {candidates} {what} of all ranks need q "
            f"[{tokens}, heads, dim], weights [{tokens}, heads] and keys [{candidates}, dim]; got "
            f"{tuple(q.shape)}, {tuple(weights.shape)} and {tuple(keys.shape)}. Gather keys by the "
            "plan of what they are keys of."
        )


def check_whole(**numbers: tuple[object, int]) -> None:
    """Refuse what is no whole number, or less than the least one. Pure."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, Integral) or value < least:
            raise PlanError(f"{name} must be a whole number from {least} on; got {value!r}.")
