"""The loss that teaches an indexer to select the tokens that attention attends to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import UnsupportedError
from ...groups import agreed, check_tensors, facts_of, outside_graphs
from ...parallel.attention.dsa.attention import checked_facts
from ...parallel.attention.dsa.gather import gather_tokens, scatter_gradients
from ...parallel.attention.dsa.indexer import IndexerInputs, check_indexer
from ...parallel.attention.dsa.kernel import Rows, row_scores, selected_rows
from ...parallel.attention.inputs import autocast
from ...parallel.attention.kernel import accumulator_dtype
from ...parallel.sequence import SequencePlan

__all__ = ["indexer_loss"]


@outside_graphs
def indexer_loss(
    q: Tensor,
    kv: Tensor,
    indexer: IndexerInputs,
    indices: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    rows: Rows,
    scale: float | None = None,
    sinks: Tensor | None = None,
    chunk_bytes: int = 64 << 20,
    check: bool = True,
) -> Tensor:
    """Return the divergence of the indexer from attention, summed over this rank's queries.

    For each query the loss is KL(p || s) over the tokens in `indices`. The distribution p is
    attention's probability of each token, summed over heads and normalised. The distribution s is
    the softmax of the query's index scores of these tokens. Divide the loss by the total number of
    queries on all ranks. The sum of gradients over ranks is then the gradient of the mean loss.

    Differentiable in the indexer's q, k and weights. Attention's q, kv and sinks get no gradient.
    Use this loss only with selectors that score single tokens and return one list of tokens per
    query, such as `TopK`.

    Collective. Forward gathers kv and indexer.k, as `dsa_attention` does. Backward gathers
    indexer.k again, and reduce-scatters the gradients of the gathered rows in float32. A float32
    tensor `[local_tokens, k]` stays in memory from forward to backward.

    Args:
        q, kv, rows, scale, sinks, check: as in `dsa_attention`.
        indices: `[local_tokens, 1, k]`, the ids that `dsa_attention` returned.
        chunk_bytes: the approximate memory of a call, in bytes. If one query needs more than
            `chunk_bytes`, the call computes one query at a time.

    Returns:
        A scalar in float32, or in float64 if the indexer's q is float64.

    Raises:
        ShapeError, PlanError, RankError: as for `dsa_attention`.
        UnsupportedError: `indices` has several lists per query.

    Source: arXiv:2512.02556, sparse training stage.
    """
    with agreed("indexer_loss", q, kv, group=group, check=check) as call:
        check_tensors(indices=indices)
        call.facts |= checked_facts(q, kv, sinks, indices, sequence, sequence, group, rows, scale)
        if indices.shape[1] != 1:
            raise UnsupportedError(
                f"indexer_loss takes one list per query; got {indices.shape[1]}, one per key head. "
                "Call it for each key head separately."
            )
        check_indexer(indexer, sequence.counts[group.rank()])
        for name, x in zip(IndexerInputs._fields, indexer, strict=True):
            call.facts |= facts_of(f"index_{name}", x)
    q, kv = (autocast(x).detach() for x in (q, kv))
    attended, keys = gather_tokens(kv, indexer.k, sequence=sequence, group=group)
    target = _Target(
        q, attended.view(sequence.tokens, 1, kv.shape[-1]), sinks, rows,
        rows.key_dim**-0.5 if scale is None else float(scale),
    )  # fmt: skip
    return _Loss.apply(
        *indexer, keys, target, _Settings(sequence, group, indices[:, 0], chunk_bytes)
    )


class _Settings(NamedTuple):
    sequence: SequencePlan
    group: dist.ProcessGroup
    indices: Tensor
    """`[local_tokens, k]`"""
    chunk_bytes: int

    def chunks(self, numbers: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Cut queries into chunks, if each selected row takes `numbers` numbers."""
        a_query = numbers * self.indices.shape[1] * dtype.itemsize
        step = max(1, self.chunk_bytes // a_query)
        for start in range(0, len(self.indices), step):
            some = slice(start, start + step)
            yield some, self.indices[some]


class _Target(NamedTuple):
    """The operands of attention, and its probabilities of selected rows, over all heads."""

    q: Tensor
    kv: Tensor
    sinks: Tensor | None
    rows: Rows
    scale: float

    @property
    def numbers(self) -> int:
        """Numbers per selected row: the row itself, and scores, sums and normalised scores."""
        return self.kv.shape[2] + 3 * self.q.shape[1]

    def log_probabilities(self, some: slice, ids: Tensor) -> Tensor:
        """Return `[queries, k]`, with -inf for a missing id."""
        dtype, ids = accumulator_dtype(self.q), ids.unsqueeze(1)
        chosen = selected_rows(self.kv, ids, dtype)
        scores = row_scores(self.q[some], chosen, ids, self.rows, self.scale)[:, 0]
        total = scores.logsumexp(-1)
        if self.sinks is not None:
            total = torch.logaddexp(total, self.sinks.to(dtype))
        # In logarithms throughout, because a sink may leave very little of a head.
        return _log_softmax((scores - _finite(total).unsqueeze(-1)).logsumexp(1))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        keys: Tensor,
        target: _Target,
        settings: _Settings,
    ) -> Tensor:
        dtype = accumulator_dtype(q)
        learns = any(ctx.needs_input_grad)
        slopes = torch.empty(
            settings.indices.shape if learns else (0,), dtype=dtype, device=q.device
        )
        loss = torch.zeros((), dtype=dtype, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for some, ids in settings.chunks(target.numbers + _numbers(q), dtype):
                wanted = target.log_probabilities(some, ids)
                _, products = _products(q[some], keys, ids, dtype)
                scores = (products.relu_() * weights[some].to(dtype).unsqueeze(2)).sum(1)
                found = _log_softmax(scores.masked_fill(ids < 0, -torch.inf))
                p = wanted.exp()
                loss += (p * (_finite(wanted) - _finite(found))).sum()
                if learns:
                    slopes[some] = found.exp() - p
        ctx.save_for_backward(q, k, weights, slopes)
        ctx.settings = settings
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, weights, slopes = ctx.saved_tensors
        settings, dtype = ctx.settings, slopes.dtype
        (keys,) = gather_tokens(k, sequence=settings.sequence, group=settings.group)
        dq, dweights = torch.empty_like(q), torch.empty_like(weights)
        dkeys = torch.zeros(keys.shape, dtype=dtype, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for some, ids in settings.chunks(2 * _numbers(q), dtype):
                chosen, products = _products(q[some], keys, ids, dtype)
                slope = (slopes[some] * grads[0]).unsqueeze(1)
                dweights[some] = (products.relu() * slope).sum(2).to(weights.dtype)
                slope = slope * weights[some].to(dtype).unsqueeze(2) * (products > 0)
                dq[some] = (slope @ chosen).to(q.dtype)
                of_rows = slope.transpose(1, 2) @ q[some].to(dtype)
                dkeys.index_add_(0, ids.clamp_min(0).flatten(), of_rows.flatten(0, 1))
        dk = None
        if ctx.needs_input_grad[1]:
            dk = scatter_gradients(dkeys, sequence=settings.sequence, group=settings.group).to(
                k.dtype
            )
        return dq, dk, dweights, None, None, None


def _numbers(q: Tensor) -> int:
    """Count numbers per selected key: itself, a copy, and products and their gradients."""
    return 2 * q.shape[2] + 3 * q.shape[1]


def _products(q: Tensor, keys: Tensor, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the selected keys `[queries, k, dim]`, and their products with q."""
    chosen = keys[ids.clamp_min(0)].to(dtype)
    return chosen, q.to(dtype) @ chosen.transpose(1, 2)


def _log_softmax(scores: Tensor) -> Tensor:
    """Return the logarithm of the softmax of each row. An empty row is -inf throughout."""
    return scores - _finite(scores.logsumexp(-1, keepdim=True))


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)
