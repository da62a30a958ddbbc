"""A rank's runs in batches of equal length, so that a kernel is called once for each length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..sequence import Run, SequencePlan
from .scan import cut_runs

__all__ = ["RunBatches", "run_batches"]


@dataclass(frozen=True)
class RunBatches:
    """A rank's runs by length, documents that are whole before those that are cut.

    Attributes:
        carried: a document is cut, here or elsewhere, so all ranks exchange.
        whole: how many batches hold whole documents.
        shapes: of each batch, its runs and the tokens of a run.
        order: local tokens, batch by batch.
        inverse: of `order`.
        cut_places: of each of `cut_runs`, its place among the runs of the cut batches.
    """

    carried: bool
    whole: int
    shapes: tuple[tuple[int, int], ...]
    order: Tensor
    inverse: Tensor
    cut_places: Tensor

    def split(self, operands: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the operands of each batch as `[runs, tokens, ...]`. Local."""
        sizes = [runs * tokens for runs, tokens in self.shapes]
        parts = [x.index_select(0, self.order.to(x.device)).split(sizes) for x in operands]
        return [
            tuple(part.unflatten(0, shape) for part in own)
            for shape, *own in zip(self.shapes, *parts, strict=True)
        ]

    def join(self, outs: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`, for one result of each batch. Local."""
        rows = torch.cat([out.flatten(0, 1) for out in outs])
        return rows.index_select(0, self.inverse.to(rows.device))


# Every layer of a step asks for the same batches; a few plans are in flight at most.
@lru_cache(maxsize=8)
def run_batches(sequence: SequencePlan, rank: int) -> RunBatches:
    """The batches of one rank. Local."""
    cut = cut_runs(sequence, rank)
    parts = _by_length(cut)
    known = set(cut)
    whole = _by_length([run for run in sequence.runs(rank) if run not in known])
    carried = any(cut_runs(sequence, other) for other in range(sequence.ranks))
    groups = [*whole, *parts]
    shapes = [(len(runs), runs[0].stop - runs[0].start) for runs in groups]
    if not parts and (carried or not whole):
        # Backward needs every rank in the exchanges, and a gradient for each parameter.
        shapes.append((0, 1))
    spans = [torch.arange(r.offset, r.offset + r.stop - r.start) for runs in groups for r in runs]
    order = torch.cat([torch.zeros(0, dtype=torch.int64), *spans])
    batched = {run: place for place, run in enumerate(run for runs in parts for run in runs)}
    places = torch.tensor([batched[run] for run in cut], dtype=torch.int64)
    return RunBatches(carried, len(whole), tuple(shapes), order, order.argsort(), places)


def _by_length(runs: Sequence[Run]) -> list[list[Run]]:
    lengths: dict[int, list[Run]] = {}
    for run in runs:
        lengths.setdefault(run.stop - run.start, []).append(run)
    return list(lengths.values())
