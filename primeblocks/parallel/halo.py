"""Tokens before the runs of a rank: what a window needs of a document that began elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..groups import all_to_all_rows
from .sequence import Run, SequencePlan

__all__ = ["Halo", "find_halo"]


@dataclass(frozen=True)
class Halo:
    """One rank's part of an exchange of the tokens before runs.

    Attributes:
        busy: some rank receives something.
        sent: own tokens to send, by receiver; on the device of those tokens.
        wanted: tokens to receive, by sender; rows as in `SequencePlan.row_of_token`.
    """

    sequence: SequencePlan
    rank: int
    busy: bool
    sent: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    wanted: Tensor

    def fetch(self, x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
        """Return own tokens, a row of zeros, and received tokens. Differentiable.

        Collective, and so is its backward: one exchange each, and none where no rank is `busy`.
        """
        parts = [x, x.new_zeros(1, *x.shape[1:])]
        if self.busy:
            received = all_to_all_rows(
                x.index_select(0, self.sent),
                send_counts=self.send_counts,
                receive_counts=self.receive_counts,
                group=group,
            )
            parts.append(received)
        return torch.cat(parts)

    @property
    def zeros(self) -> int:
        """The row of zeros in what `fetch` returns."""
        return self.sequence.counts[self.rank]

    def rows(self, places: Tensor) -> Tensor:
        """Return the row of each token in what `fetch` returns; own and wanted ones have one."""
        row, start = self.sequence.row_of_token[places], sum(self.sequence.counts[: self.rank])
        own = (row >= start) & (row < start + self.zeros)
        received = self.zeros + 1 + torch.searchsorted(self.wanted, row)
        return torch.where(own, row - start, received)


def find_halo(
    sequence: SequencePlan, rank: int, first: Callable[[Run], int], *, device: torch.device
) -> Halo:
    """Find the exchange after which each run has the tokens from place `first(run)` on. Local.

    A token travels once, however many runs of a rank want it, and not at all where it is at home.
    Keep it: it copies to the device, which makes the host wait.
    """
    # Rows one rank after the other: a rank's rows are neighbours, and arrive in this order.
    bounds = torch.tensor([0, *sequence.counts]).cumsum(0)
    start, stop = int(bounds[rank]), int(bounds[rank + 1])
    wanted = [_wanted(sequence, receiver, first, bounds) for receiver in range(sequence.ranks)]
    sent = [rows[(rows >= start) & (rows < stop)] - start for rows in wanted]
    return Halo(
        sequence=sequence,
        rank=rank,
        busy=any(len(rows) for rows in wanted),
        sent=torch.cat(sent).to(device),
        send_counts=tuple(len(rows) for rows in sent),
        receive_counts=tuple(torch.searchsorted(wanted[rank], bounds).diff().tolist()),
        wanted=wanted[rank],
    )


def _wanted(
    sequence: SequencePlan, rank: int, first: Callable[[Run], int], bounds: Tensor
) -> Tensor:
    """Rows of other ranks' tokens before the runs of `rank`, ascending, each once."""
    before = [sequence.row_of_token[first(run) : run.start] for run in sequence.runs(rank)]
    rows = torch.cat([torch.zeros(0, dtype=torch.int64), *before]).unique()
    return rows[(rows < bounds[rank]) | (rows >= bounds[rank + 1])]
