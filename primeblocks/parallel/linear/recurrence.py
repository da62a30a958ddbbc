"""The gated delta rule and Mamba-2 over a sequence that ranks share.

Every run of tokens is first computed from a state of zero. `scan_states` then finds the true first
states, and their effect is added to the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...errors import ShapeError
from ...groups import agreed, outside_graphs
from ..sequence import Run, SequencePlan, kept_on_plan
from .convolution import as_they_are, checked_facts, shapes
from .kernels import chunk_gated_delta_rule, chunk_state_space
from .scan import cut_runs, scan_states

__all__ = ["RunBatches", "gated_delta_rule", "run_batches", "state_space"]

_Kernel = Callable[..., tuple[Tensor, Tensor]]


@outside_graphs
@as_they_are
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    kernel: Callable[..., tuple[Tensor, Tensor]] = chunk_gated_delta_rule,
    check: bool = True,
) -> Tensor:
    """Compute the gated delta rule on each document.

    The rule is `S = exp(g) S; S += k (beta (v - S^T k))^T; o = S^T q / sqrt(key_dim)`.

    All ranks compute their runs at the same time. A run that is a part of a document is computed
    from a state of zero. For such a run, `kernel` gets `key_dim` additional columns of values. The
    results in these columns show how a first state changes the output and the last state. An
    exchange determines the true first state of the run. Whole documents of equal length share one
    call of `kernel`, and so do parts of equal length. Differentiable.

    The call and its backward are collective, with two exchanges each. All ranks skip the exchanges
    if no document is cut between ranks. The exchanges send at most
    `heads x (key_dim^2 + 2 key_dim value_dim)` elements for each run of a cut document. Orders with
    few runs are therefore cheap, such as "contiguous", or "balanced" with large chunks. In a cut
    document, work that is proportional to `value_dim` becomes proportional to
    `key_dim + value_dim`.

    The call does not check for NaN. A NaN spreads to later tokens of its document, but not to other
    documents.

    Args:
        q, k: `[tokens, heads, key_dim]`, this rank's part. If the model normalises q and k, but
            `kernel` does not, normalise q and k before the call. Repeat grouped heads before the
            call.
        v: `[tokens, heads, value_dim]`.
        g: `[tokens, heads]`, the logarithm of the decay, at most 0.
        beta: `[tokens, heads]`.
        kernel: a function from `(q, k, v, g=, beta=, initial_state=)` to the output and the last
            state, for any `value_dim`. Tensors have a first dim for a batch, and states are
            `[batch, heads, key_dim, value_dim]`. An example is
            `partial(f, output_final_state=True)`, where `f` is the gated delta rule of transformers
            or of flash-linear-attention.
        check: as in `ring_attention`.

    Returns:
        `[tokens, heads, value_dim]` in the dtype of `v`.

    Raises:
        ShapeError: the operands do not fit together, or do not fit this rank's part of the plan.
        PlanError, UnsupportedError, RankError: the errors of `causal_conv1d`.

    Source: arXiv:2412.06464 (gated delta networks).
    """
    with agreed("gated_delta_rule", q, k, v, g, beta, group=group, check=check) as call:
        call.facts |= checked_facts(sequence, group, q=q, k=k, v=v, g=g, beta=beta)
        fits = q.ndim == k.ndim == v.ndim == 3 and q.shape == k.shape
        if not fits or not k.shape[:2] == v.shape[:2] == g.shape == beta.shape:
            raise ShapeError(
                "gated_delta_rule needs q, k [tokens, heads, key_dim], v [tokens, heads, "
                f"value_dim] and g, beta [tokens, heads]; got {shapes(q, k, v, g, beta)}. Repeat "
                "grouped heads first, and leave out the batch."
            )
        sequence.check_tokens(group, v=v)
    batches = run_batches(sequence, group.rank(), q.device)
    outs, probes = [], []
    for index, (q_, k_, v_, g_, beta_) in enumerate(batches.split((q, k, v, g, beta))):
        if index < batches.whole:
            outs.append(kernel(q_, k_, v_, g=g_, beta=beta_, initial_state=None)[0])
        else:
            probes.append(_probe_delta(kernel, q_, k_, v_, g_, beta_))
    outs += _carry(probes, "nthk,nhkv->nthv", _wide(v), batches, sequence, group)
    return batches.join(outs).to(v.dtype)


@outside_graphs
@as_they_are
def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    kernel: Callable[..., tuple[Tensor, Tensor]] = chunk_state_space,
    check: bool = True,
) -> Tensor:
    """Compute Mamba-2, `S = exp(dt A) S + (dt x) B^T; y = S C + D x`, on each document.

    Runs are computed from states of zero, and share calls of `kernel`, as in `gated_delta_rule`.
    The function then adds the effect of the true first states to the output. Differentiable.

    The call and its backward are collective, with the exchanges of `gated_delta_rule`. The
    exchanges send at most `heads x (2 head_dim state_dim + 1)` elements for each run of a cut
    document. A NaN spreads as in `gated_delta_rule`.

    Args:
        x: `[tokens, heads, head_dim]`, this rank's part.
        dt: `[tokens, heads]`, the step sizes, with bias, softplus and limits applied.
        A: `[heads]`, at most 0.
        B, C: `[tokens, groups, state_dim]`. `groups` must divide `heads`.
        D: `[heads]`, the factor of the skip term. With `D=None`, the skip term is left out.
        kernel: a function from `(x, dt, A, B, C)` to the output and the last state. Tensors have a
            first dim for a batch, and states are `[batch, heads, head_dim, state_dim]`. An example
            is `partial(f, chunk_size=..., return_final_states=True)`, where `f` is transformers'
            `mamba2_chunk_scan` or mamba-ssm's `mamba_chunk_scan_combined`.
        check: as in `ring_attention`.

    Returns:
        `[tokens, heads, head_dim]` in the dtype of `x`.

    Raises:
        ShapeError: the operands do not fit together, or do not fit this rank's part of the plan.
        PlanError, UnsupportedError, RankError: the errors of `causal_conv1d`.

    Source: arXiv:2405.21060 (state space duality).
    """
    with agreed("state_space", x, dt, A, B, C, group=group, check=check) as call:
        optional = {} if D is None else {"D": D}
        call.facts |= checked_facts(sequence, group, x=x, dt=dt, A=A, B=B, C=C, **optional)
        shaped = x.ndim == B.ndim == 3 and B.shape == C.shape and B.shape[0] == x.shape[0]
        if (
            not shaped
            or dt.shape != x.shape[:2]
            or not B.shape[1]
            or x.shape[1] % B.shape[1]
            or not all(t is None or t.shape == x.shape[1:2] for t in (A, D))
        ):
            raise ShapeError(
                "state_space needs x [tokens, heads, head_dim], dt [tokens, heads], A [heads], "
                "B, C [tokens, groups, state_dim] with groups that divide heads, and D [heads]; "
                f"got {shapes(x, dt, A, B, C, *optional.values())}. Leave out the batch."
            )
        sequence.check_tokens(group, x=x)
    batches = run_batches(sequence, group.rank(), x.device)
    outs, probes = [], []
    for index, (x_, dt_, B_, C_) in enumerate(batches.split((x, dt, B, C))):
        if index < batches.whole:
            outs.append(kernel(x_, dt_, A, B_, C_)[0])
        else:
            probes.append(_probe_state_space(kernel, x_, dt_, A, B_, C_))
    outs += _carry(probes, "nthk,nhvk->nthv", _wide(x), batches, sequence, group)
    out = batches.join(outs)
    return (out if D is None else out + D.unsqueeze(1) * x).to(x.dtype)


class _Probe(NamedTuple):
    """Results of runs that started from zero, and the effect of a first state on them."""

    out: Tensor
    """`[runs, tokens, heads, value_dim]`"""
    reads: Tensor
    """For each token, the factor that reads the first state, `[runs, tokens, heads, key_dim]`"""
    update: Tensor
    """The last state"""
    transition: Tensor
    """The map from the first state to the last state"""


def _probe_delta(
    kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> _Probe:
    runs, _, heads, key_dim = k.shape
    if not runs:
        # Empty, but computed from all operands, so that their gradients are zero and not None.
        reads = q * k * (g * beta).unsqueeze(-1)
        update = torch.einsum("nthk,nthv->nhkv", reads, v)
        return _Probe(v * reads.sum(-1, True), reads, update, update @ update.mT)
    dtype = _wide(v)
    # Columns of a state are independent, so those of the identity become the transition.
    unit = F.pad(torch.eye(key_dim, dtype=dtype, device=v.device), (v.shape[-1], 0))
    first = unit.expand(runs, heads, -1, -1)
    out, last = kernel(q, k, F.pad(v, (0, key_dim)), g=g, beta=beta, initial_state=first)
    sizes = [v.shape[-1], key_dim]
    return _Probe(*out.split(sizes, dim=-1), *last.split(sizes, dim=-1))


def _probe_state_space(
    kernel: _Kernel, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> _Probe:
    dtype = _wide(x)
    decay = (dt.to(dtype) * A.to(dtype)).cumsum(1).exp()
    b, c = (t.to(dtype).repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    reads = c * decay.unsqueeze(-1)
    if len(x):
        out, update = kernel(x, dt, A, B, C)
    else:
        # As for the delta rule: empty, but computed from all operands.
        out = x * (b * reads).sum(-1, True)
        update = torch.einsum("nthv,nthk->nhvk", out, b)
    return _Probe(out, reads, update, decay[:, -1])


def _carry(
    probes: list[_Probe],
    reading: str,
    dtype: torch.dtype,
    batches: RunBatches,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Return the outputs of the probed runs from their true first states."""
    if not batches.carried:
        return [probe.out for probe in probes]
    places = batches.cut_places
    # One dtype on all ranks, also on ranks without a run, whatever the kernel returned.
    update = torch.cat([probe.update for probe in probes]).to(dtype).index_select(0, places)
    fade = torch.cat([probe.transition for probe in probes]).to(dtype).index_select(0, places)
    states = scan_states(update, fade, sequence=sequence, group=group)
    states = torch.zeros_like(states).index_copy(0, places, states)
    by_batch = states.split([len(probe.update) for probe in probes])
    return [
        probe.out + torch.einsum(reading, probe.reads.to(state.dtype), state)
        for probe, state in zip(probes, by_batch, strict=True)
    ]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True)
class RunBatches:
    """A rank's runs in batches of equal length. Whole documents precede parts of documents.

    Attributes:
        carried: whether some document is cut, on this rank or another, so that all ranks exchange.
        whole: the number of batches that hold whole documents.
        shapes: for each batch, the number of its runs and the tokens of a run.
        order: local tokens, batch by batch.
        inverse: the inverse of `order`.
        cut_places: for each of `cut_runs`, its place among the runs of the cut batches.
    """

    carried: bool
    whole: int
    shapes: tuple[tuple[int, int], ...]
    order: Tensor
    inverse: Tensor
    cut_places: Tensor

    def split(self, operands: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the operands of each batch as `[runs, tokens, ...]`."""
        sizes = [runs * tokens for runs, tokens in self.shapes]
        parts = [x.index_select(0, self.order).split(sizes) for x in operands]
        return [
            tuple(part.unflatten(0, shape) for part in own)
            for shape, *own in zip(self.shapes, *parts, strict=True)
        ]

    def join(self, outs: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`, for one result of each batch."""
        rows = torch.cat([out.flatten(0, 1) for out in outs])
        return rows.index_select(0, self.inverse)


@kept_on_plan
def run_batches(sequence: SequencePlan, rank: int, device: torch.device) -> RunBatches:
    cut = cut_runs(sequence, rank)
    parts = _by_length(cut)
    known = set(cut)
    whole = _by_length([run for run in sequence.runs(rank) if run not in known])
    carried = any(cut_runs(sequence, other) for other in range(sequence.ranks))
    groups = [*whole, *parts]
    shapes = [(len(runs), runs[0].stop - runs[0].start) for runs in groups]
    if not parts and (carried or not whole):
        # An empty batch: backward needs every rank in the exchanges, and a gradient per parameter.
        shapes.append((0, 1))
    spans = [torch.arange(r.offset, r.offset + r.stop - r.start) for runs in groups for r in runs]
    order = torch.cat([torch.zeros(0, dtype=torch.int64), *spans])
    batched = {run: place for place, run in enumerate(run for runs in parts for run in runs)}
    places = torch.tensor([batched[run] for run in cut], dtype=torch.int64)
    tables = (each.to(device) for each in (order, order.argsort(), places))
    return RunBatches(carried, len(whole), tuple(shapes), *tables)


def _by_length(runs: Sequence[Run]) -> list[list[Run]]:
    lengths: dict[int, list[Run]] = {}
    for run in runs:
        lengths.setdefault(run.stop - run.start, []).append(run)
    return list(lengths.values())
