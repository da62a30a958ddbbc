"""States of a linear recurrence, passed between the runs of documents that ranks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...groups import all_to_all_rows
from ..sequence import Run, SequencePlan, kept_on_plan

__all__ = ["cut_runs", "scan_states"]


def cut_runs(sequence: SequencePlan, rank: int) -> tuple[Run, ...]:
    """Return the runs of `rank` that are only a part of a document, in order."""
    runs = sequence.runs(rank)
    return tuple(runs[index] for index in _chains(sequence, torch.device("cpu")).links[rank])


def scan_states(
    updates: Tensor, transitions: Tensor, *, sequence: SequencePlan, group: dist.ProcessGroup
) -> Tensor:
    """Return the state that each of this rank's cut runs starts from.

    A run turns its first state `S` into `transition @ S + update`. A document starts from zero. No
    rank waits for its predecessor, because every rank composes all runs for its share of the heads.
    So each update and transition travels once for any number of ranks. Differentiable.

    Collective, and so is its backward: two exchanges each, or none if no document is cut. Let a
    head have `s` elements of state and `t` elements of transition. The exchanges then move at most
    `heads x (2 s + t)` elements per cut run. Unused elements do not travel: the transition and the
    state of a document's first run, and the update and the transition of its last run.

    Args:
        updates: `[runs, heads, ...]`, one row for each of `cut_runs(sequence, rank)`: the state
            after the run if the run starts from zero.
        transitions: `[runs, heads]` for a scalar decay, or `[runs, heads, d, d]` for a matrix
            that multiplies states `[d, ...]` from the left.

    Returns:
        `[runs, heads, ...]` like `updates`. A run that begins a document has zeros.

    Source: Blelloch 1990 (scans of affine maps); arXiv:2405.21060, section 8 (SSD over devices).
    """
    chains, rank = _chains(sequence, updates.device), group.rank()
    if not chains.receivers_by_step:
        return torch.zeros_like(updates)
    total, ranks = updates.shape[1], sequence.ranks
    heads = [total * (r + 1) // ranks - total * r // ranks for r in range(ranks)]
    summaries = _send_summaries(updates, transitions, chains, heads, group)
    states = _compose(*summaries, chains)
    arrived = _return_states(states, chains, heads, group)
    receivers = chains.receivers[rank]
    return torch.zeros_like(updates).index_copy(0, receivers, arrived)


@dataclass(frozen=True)
class _Chains:
    """The runs of each cut document as a chain, in the document's order. Runs of chains are links.

    Attributes:
        links: for each rank, its runs that are links.
        senders: for each rank, its links that have a successor.
        middles: for each rank, its links with both neighbours, whose transitions are needed.
        receivers: for each rank, its links that have a predecessor.
        receivers_by_step: for each step, the number of chains with a receiver. Longest first.
        updates: for each step, rows of the updates of all senders.
        transitions: for each step except the first, rows of the transitions of all middles.
        returned: for each rank, rows of the states that it receives, among those of all steps.
    """

    links: tuple[tuple[int, ...], ...]
    senders: tuple[Tensor, ...]
    middles: tuple[Tensor, ...]
    receivers: tuple[Tensor, ...]
    receivers_by_step: tuple[int, ...]
    updates: tuple[Tensor, ...]
    transitions: tuple[Tensor, ...]
    returned: tuple[Tensor, ...]


@kept_on_plan
def _chains(sequence: SequencePlan, device: torch.device) -> _Chains:
    ranks = range(sequence.ranks)
    documents: dict[int, list[tuple[int, int, int]]] = {}
    for rank in ranks:
        for index, run in enumerate(sequence.runs(rank)):
            documents.setdefault(run.document, []).append((run.start, rank, index))
    chains = [[link[1:] for link in sorted(runs)] for runs in documents.values() if len(runs) > 1]
    chains.sort(key=len, reverse=True)
    links = [sorted(link for chain in chains for link in chain if link[0] == r) for r in ranks]
    firsts = {chain[0] for chain in chains}
    lasts = {chain[-1] for chain in chains}
    senders = [[link for link in own if link not in lasts] for own in links]
    middles = [[link for link in own if link not in firsts] for own in senders]
    receivers = [[link for link in own if link not in firsts] for own in links]
    # Chains are sorted by length, so the chains that continue at a step are the first ones.
    steps = [
        [(chain[i], chain[i + 1]) for chain in chains if len(chain) > i + 1]
        for i in range(max(map(len, chains), default=1) - 1)
    ]
    update_row = {link: row for row, link in enumerate(link for own in senders for link in own)}
    transition_row = {link: row for row, link in enumerate(link for own in middles for link in own)}
    state_row = {to: row for row, (_, to) in enumerate(pair for step in steps for pair in step)}
    return _Chains(
        links=tuple(tuple(index for _, index in own) for own in links),
        senders=tuple(_places(links[r], senders[r], device) for r in ranks),
        middles=tuple(_places(links[r], middles[r], device) for r in ranks),
        receivers=tuple(_places(links[r], receivers[r], device) for r in ranks),
        receivers_by_step=tuple(len(step) for step in steps),
        updates=tuple(_rows([update_row[start] for start, _ in step], device) for step in steps),
        transitions=tuple(
            _rows([transition_row[start] for start, _ in step], device) for step in steps[1:]
        ),
        returned=tuple(_rows([state_row[link] for link in receivers[r]], device) for r in ranks),
    )


def _send_summaries(
    updates: Tensor,
    transitions: Tensor,
    chains: _Chains,
    heads: list[int],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Return updates of all senders and transitions of all middles, `[own_heads, rows, ...]`."""
    rank = group.rank()
    flat = torch.cat(
        [
            updates.index_select(0, chains.senders[rank]).transpose(0, 1).flatten(1),
            transitions.index_select(0, chains.middles[rank]).transpose(0, 1).flatten(1),
        ],
        dim=1,
    ).to(updates.dtype)
    state, transition = updates[:1, :1].shape[2:], transitions[:1, :1].shape[2:]
    sizes = [
        (len(senders) * state.numel(), len(middles) * transition.numel())
        for senders, middles in zip(chains.senders, chains.middles, strict=True)
    ]
    counts = [heads[rank] * sum(size) for size in sizes]
    received = all_to_all_rows(
        flat.flatten(),
        send_counts=[share * flat.shape[1] for share in heads],
        receive_counts=counts,
        group=group,
    )
    parts = [
        part.view(heads[rank], sum(size)).split(size, dim=1)
        for part, size in zip(received.split(counts), sizes, strict=True)
    ]
    all_updates = torch.cat([part for part, _ in parts], dim=1)
    all_transitions = torch.cat([part for _, part in parts], dim=1)
    return (
        all_updates.view(heads[rank], sum(map(len, chains.senders)), *state),
        all_transitions.view(heads[rank], sum(map(len, chains.middles)), *transition),
    )


def _compose(updates: Tensor, transitions: Tensor, chains: _Chains) -> Tensor:
    """Return the states that receivers start from, by step, `[own_heads, rows, ...]`."""
    state = updates.index_select(1, chains.updates[0])
    states = [state]
    for going_on, update_rows, transition_rows in zip(
        chains.receivers_by_step[1:], chains.updates[1:], chains.transitions, strict=True
    ):
        update = updates.index_select(1, update_rows)
        transition = transitions.index_select(1, transition_rows)
        state = _apply(transition, state[:, :going_on]) + update
        states.append(state)
    return torch.cat(states, dim=1)


def _apply(transition: Tensor, state: Tensor) -> Tensor:
    if transition.ndim == 2:
        return transition.reshape(transition.shape + (1,) * (state.ndim - 2)) * state
    return (transition @ state.flatten(3)).view_as(state)


def _return_states(
    states: Tensor, chains: _Chains, heads: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Return the states of own receivers, `[receivers, heads, ...]`."""
    rank, shape = group.rank(), states.shape[2:]
    own = len(chains.returned[rank])
    sent = [states.index_select(1, rows).flatten() for rows in chains.returned]
    arrived = all_to_all_rows(
        torch.cat(sent),
        send_counts=[part.numel() for part in sent],
        receive_counts=[share * own * shape.numel() for share in heads],
        group=group,
    )
    return arrived.view(sum(heads), own, *shape).transpose(0, 1)


def _rows(rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _places(
    links: list[tuple[int, int]], chosen: list[tuple[int, int]], device: torch.device
) -> Tensor:
    wanted = set(chosen)
    return _rows([place for place, link in enumerate(links) if link in wanted], device)
