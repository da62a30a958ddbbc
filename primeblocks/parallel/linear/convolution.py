"""Causal convolution over documents whose tokens are on several ranks.

The checks of operands at the end of the file are also those of recurrences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...errors import ShapeError
from ...groups import agreed, all_to_all_rows, check_tensors, facts_of, outside_graphs
from ..sequence import Run, SequencePlan, check_plan, kept_on_plan

__all__ = ["Halo", "as_they_are", "causal_conv1d", "checked_facts", "find_halo", "shapes"]

P = ParamSpec("P")
R = TypeVar("R")


def as_they_are(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast, which would narrow sums that are promised in float32."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(next((x.device.type for x in given), "cpu"), enabled=False):
            return function(*args, **kwargs)

    return call


@outside_graphs
@as_they_are
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    check: bool = True,
) -> Tensor:
    """Convolve each channel with its own kernel over each document, with zeros before the document.

    The result equals `nn.Conv1d(groups=channels)` with a left padding of `kernel - 1` for each
    document separately. If a document began on another rank, this rank receives up to `kernel - 1`
    tokens that precede its own tokens. The convolution computes in the dtype of `weight`, and the
    result has the dtype of `x`. Differentiable.

    The call and its backward are collective, with one exchange each. A rank receives at most
    `(kernel - 1) x channels` elements of `x` for each of its runs. All ranks skip the exchange if
    no document is cut between ranks, or if the kernel has one tap.

    Args:
        x: `[tokens, channels]`, this rank's part.
        weight: `[channels, kernel]`. The last tap of a kernel multiplies the token itself.
        bias: `[channels]`.
        check: as in `ring_attention`.

    Raises:
        ShapeError: `weight` or `bias` does not fit `x`, or `x` is not this rank's part.
        PlanError: `group` does not fit the plan, or ranks differ in plans, in sizes, or in whether
            gradients are needed.
        UnsupportedError: the plan has `parents`.
        RankError: another rank refused its arguments.
    """
    with agreed("causal_conv1d", x, weight, group=group, check=check) as call:
        optional = {} if bias is None else {"bias": bias}
        call.facts |= checked_facts(sequence, group, x=x, weight=weight, **optional)
        if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
            raise ShapeError(
                "causal_conv1d needs x [tokens, channels] and weight [channels, kernel]; got "
                f"{shapes(x, weight)}. For an nn.Conv1d, pass weight.squeeze(1)."
            )
        if bias is not None and bias.shape != x.shape[1:]:
            raise ShapeError(
                f"bias must have one number per channel, [{x.shape[1]}]; got {shapes(bias)}."
            )
        sequence.check_tokens(group, x=x)
    halo, places, kept = _tables(sequence, group.rank(), weight.shape[1] - 1, x.device)
    padded = halo.fetch(x, group=group).index_select(0, places).to(weight.dtype)
    bias = None if bias is None else bias.to(weight.dtype)
    out = F.conv1d(padded.T.unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[1])
    return out[0].T.index_select(0, kept).to(x.dtype)


@kept_on_plan
def _tables(
    sequence: SequencePlan, rank: int, reach: int, device: torch.device
) -> tuple[Halo, Tensor, Tensor]:
    """Return the exchange, the rows of its result to convolve (each run after its context), and
    the outputs of the convolution that belong to own tokens.
    """
    halo = find_halo(
        sequence, rank, lambda run: max(run.document, run.start - reach), device=device
    )
    padded, kept, place = [], [torch.zeros(0, dtype=torch.int64)], 0
    for run in sequence.runs(rank):
        tokens = run.stop - run.start
        inside = min(reach, run.start - run.document)
        context = halo.rows(torch.arange(run.start - inside, run.start))
        zeros = torch.full((reach - inside,), halo.zeros)
        padded += [zeros, context, torch.arange(run.offset, run.offset + tokens)]
        kept.append(torch.arange(place, place + tokens))
        place += reach + tokens
    if not padded:
        # One output to discard: the backward of the exchange needs every rank, and `weight` needs a
        # gradient of zero instead of None.
        padded.append(torch.zeros(reach + 1, dtype=torch.int64))
    return halo, torch.cat(padded).to(device), torch.cat(kept).to(device)


@dataclass(frozen=True)
class Halo:
    """One rank's part of an exchange of the tokens before runs.

    A run needs these tokens if its document began on another rank.

    Attributes:
        own: the range of this rank's rows in `SequencePlan.row_of_token`.
        row_of_token: `SequencePlan.row_of_token`.
        busy: whether some rank receives tokens.
        sent: own tokens to send, in the order of receivers, on the device of the tokens.
        wanted: rows of the tokens to receive, in the order of senders.
    """

    own: range
    row_of_token: Tensor
    busy: bool
    sent: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    wanted: Tensor

    def fetch(self, x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
        """Return own tokens, a row of zeros, and received tokens. Differentiable.

        Collective, and so is its backward: one exchange each, except if no rank is `busy`.
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
        """The index of the row of zeros in the result of `fetch`."""
        return len(self.own)

    def rows(self, places: Tensor) -> Tensor:
        """Return the row of each own or wanted token in the result of `fetch`."""
        row = self.row_of_token[places]
        own = (row >= self.own.start) & (row < self.own.stop)
        received = self.zeros + 1 + torch.searchsorted(self.wanted, row)
        return torch.where(own, row - self.own.start, received)


def find_halo(
    sequence: SequencePlan, rank: int, first: Callable[[Run], int], *, device: torch.device
) -> Halo:
    """Find the exchange after which each run has the tokens from place `first(run)` on. Local.

    A token travels at most once to each rank, and a rank's own tokens do not travel. Reuse the
    result, because a call copies tables to the device, which makes the host wait.
    """
    # In `row_of_token`, the rows of a rank are consecutive. Tokens arrive in the order of rows.
    bounds = torch.tensor([0, *sequence.counts]).cumsum(0)
    start, stop = int(bounds[rank]), int(bounds[rank + 1])
    wanted = [_wanted(sequence, receiver, first, bounds) for receiver in range(sequence.ranks)]
    sent = [rows[(rows >= start) & (rows < stop)] - start for rows in wanted]
    return Halo(
        own=range(start, stop),
        row_of_token=sequence.row_of_token,
        busy=any(len(rows) for rows in wanted),
        sent=torch.cat(sent).to(device),
        send_counts=tuple(len(rows) for rows in sent),
        receive_counts=tuple(torch.searchsorted(wanted[rank], bounds).diff().tolist()),
        wanted=wanted[rank],
    )


def _wanted(
    sequence: SequencePlan, rank: int, first: Callable[[Run], int], bounds: Tensor
) -> Tensor:
    before = [sequence.row_of_token[first(run) : run.start] for run in sequence.runs(rank)]
    rows = torch.cat([torch.zeros(0, dtype=torch.int64), *before]).unique()
    return rows[(rows < bounds[rank]) | (rows >= bounds[rank + 1])]


def checked_facts(
    sequence: SequencePlan, group: dist.ProcessGroup, **operands: Tensor
) -> dict[str, object]:
    """Check this rank's arguments, and return the facts that must be equal on all ranks. Local."""
    check_plan(sequence, group)
    check_tensors(**operands)
    odd = {name: x.dtype for name, x in operands.items() if not x.is_floating_point()}
    if odd:
        raise ShapeError(f"all operands must be floating-point; got {odd}.")
    found: dict[str, object] = {"plan": sequence.fingerprint, "operands": " ".join(operands)}
    for name, x in operands.items():
        found |= facts_of(name, x)
    return found


def shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)
