"""Sparse attention over a split sequence: each query reads a few of the rows of all ranks.

A forward gathers rows once, and so does a backward. The indexer selects, and the kernel reads the
selected rows.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....errors import ShapeError
from ....groups import agreed, check_alike, check_tensors, facts_of, outside_graphs
from ...sequence import SequencePlan, check_plan
from ..hops import gradient_of_sinks, with_sinks
from ..inputs import autocast, check_factors, check_sinks
from .gather import gather_tokens, scatter_gradients
from .indexer import IndexerInputs, IndexScores, Selector, check_indexer, select
from .kernel import ReferenceKernel, Rows, SparseKernel

__all__ = ["checked_facts", "dsa_attention", "sparse_attention"]


@outside_graphs
def dsa_attention(
    q: Tensor,
    kv: Tensor,
    indexer: IndexerInputs,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    rows: Rows,
    selector: Selector,
    scale: float | None = None,
    sinks: Tensor | None = None,
    kernel: SparseKernel | None = None,
    scores: IndexScores | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute attention of each query to the rows that an indexer selects, over a split sequence.

    Each rank keeps its queries. One all-gather fetches the rows of kv and the indexer's keys of all
    tokens. The indexer computes the scores of this rank's queries in chunks, so the matrix of all
    scores is never stored. The kernel reads only the selected rows. The function supports every
    order of tokens and every mix of documents without `parents`. Ranks may have different numbers
    of tokens, also zero.

    The output is differentiable in q, kv and sinks. The indexer gets no gradient.

    The call is collective. In forward, a rank receives `(ranks - 1) * max(sequence.counts)` rows of
    kv and of indexer.k. In backward, a rank receives the rows of kv again. A reduce-scatter then
    sends the same number of rows of gradients in float32, or in float64 for float64 operands.

    To share the selection of another layer, call `sparse_attention` with the indices of the other
    layer.

    Args:
        q: `[local_tokens, heads, key_dim]`, with rotary embedding applied. For latent attention,
            absorb the key projection into q first.
        kv: `[local_tokens, width]` or `[local_tokens, groups, width]`, with rotary embedding
            applied.
        indexer: this rank's queries, keys and weights of the indexer.
        rows: the columns of kv that are the key, and the columns that are the value.
        selector: the rule that selects rows, such as `TopK(2048)`. Ranks compare the settings of a
            selector only if the selector is a dataclass.
        scale: the factor by which attention scores are multiplied. Default: `key_dim ** -0.5`. For
            latent attention, pass the model's scale, computed from the key dim before absorption.
        sinks: `[heads]`, for each head the score of an additional key with a value of zero.
        kernel: the kernel that computes attention to the selected rows. Default:
            `ReferenceKernel()`.
        scores: the function that computes the scores of the indexer. Default: `index_scores`.
        check: as in `ring_attention`.

    Returns:
        The output, `[local_tokens, heads, value_dim]`, and the indices, int32
        `[local_tokens, groups, k]`. The indices are ascending token indices in the whole sequence,
        followed by -1. If tokens have equal scores, `TopK` selects the earliest token.

    Raises:
        ShapeError: shapes, dtypes or heads do not fit together, or do not fit the plan.
        PlanError: `group` does not fit the plan, or ranks have different plans.
        UnsupportedError: the plan has `parents`.
        RankError: another rank refused its arguments.

    Source: arXiv:2512.02556 (DeepSeek-V3.2); docs/dsa.md.
    """
    with agreed("dsa_attention", q, kv, group=group, check=check) as call:
        call.facts |= checked_facts(q, kv, sinks, None, sequence, sequence, group, rows, scale)
        check_indexer(indexer, sequence.counts[group.rank()])
        call.facts |= {
            # The text of another object may contain its address, which differs between ranks.
            "selector": selector if is_dataclass(selector) else type(selector).__qualname__,
            "index_dim": indexer.k.shape[1],
            "index_dtype": indexer.k.dtype,
        }
    q, kv = autocast(q), autocast(kv)
    whole, keys = gather_tokens(kv, indexer.k, sequence=sequence, group=group)
    indices = select(
        indexer, keys, selector=selector, sequence=sequence, rank=group.rank(), scores=scores
    )
    out = sparse_attention(
        q, kv, indices, sequence=sequence, group=group, rows=rows, scale=scale, sinks=sinks,
        whole=whole, kernel=kernel, check=False,
    )  # fmt: skip
    return out, indices


@outside_graphs
def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    rows: Rows,
    scale: float | None = None,
    sinks: Tensor | None = None,
    entries: SequencePlan | None = None,
    whole: Tensor | None = None,
    kernel: SparseKernel | None = None,
    check: bool = True,
) -> Tensor:
    """Compute attention of each query to the rows in `indices`, over a split sequence.

    The indices may come from `select`, from another layer, or from an inference engine whose
    selection is replayed. The output is differentiable in q, kv and sinks. The call is collective
    like `dsa_attention`, but does not gather the indexer's keys.

    Args:
        indices: int32 `[local_tokens, groups, k]`: indices of rows of the whole kv, followed by -1.
            A row is a token, or an entry that was computed from several tokens. The call does not
            check for rows after the query's token, or for repeated rows. Such rows make results
            wrong without an error.
        entries: the plan of the rows of kv, if some rows are entries. Default: `sequence`.
        whole: the result of `gather_tokens(kv, ...)`, if you have gathered the rows already. Only
            forward uses `whole`.

    Other arguments, results and errors are the same as for `dsa_attention`.
    """
    plan = sequence if entries is None else entries
    with agreed("sparse_attention", q, kv, group=group, check=check) as call:
        check_tensors(indices=indices)
        call.facts |= checked_facts(q, kv, sinks, indices, sequence, plan, group, rows, scale)
    q, kv = autocast(q), autocast(kv)
    if whole is None:
        (whole,) = gather_tokens(kv, sequence=plan, group=group)
    factor = rows.key_dim**-0.5 if scale is None else float(scale)
    engine = ReferenceKernel() if kernel is None else kernel
    settings = _Settings(plan, group, rows, factor, engine)
    return _Sparse.apply(q, kv, sinks, indices, whole, settings)


class _Settings(NamedTuple):
    entries: SequencePlan
    group: dist.ProcessGroup
    rows: Rows
    scale: float
    kernel: SparseKernel


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        indices: Tensor,
        whole: Tensor,
        settings: _Settings,
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = settings.kernel.forward(
                q, _grouped(whole), indices, rows=settings.rows, scale=settings.scale
            )
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
            out = out.to(q.dtype)
        # Save this rank's rows. The rows of all ranks, for every layer, would take gigabytes.
        ctx.save_for_backward(q, kv, sinks, indices, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, kv, sinks, indices, out, lse = ctx.saved_tensors
        entries, group, rows, scale, kernel = ctx.settings
        grad = grads[0].contiguous()
        (whole,) = gather_tokens(kv, sequence=entries, group=group)
        with torch.autocast(q.device.type, enabled=False):
            dq, dkv = kernel.backward(
                grad, q, _grouped(whole), indices, out, lse, rows=rows, scale=scale
            )
        del whole
        dkv = scatter_gradients(dkv, sequence=entries, group=group)
        of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        return dq, dkv.reshape(kv.shape).to(kv.dtype), of_sinks, None, None, None


def _grouped(kv: Tensor) -> Tensor:
    return kv if kv.ndim == 3 else kv.unsqueeze(1)


def checked_facts(
    q: Tensor,
    kv: Tensor,
    sinks: Tensor | None,
    indices: Tensor | None,
    sequence: SequencePlan,
    entries: SequencePlan,
    group: dist.ProcessGroup,
    rows: Rows,
    scale: float | None,
) -> dict[str, object]:
    """Check this rank's arguments, and return the facts that must be equal on all ranks. Local."""
    check_plan(sequence, group)
    check_plan(entries, group)
    check_tensors(q=q, kv=kv, **({} if sinks is None else {"sinks": sinks}))
    if kv.ndim and kv.shape[0] != entries.counts[group.rank()]:
        raise ShapeError(
            f"the plan gives this rank {entries.counts[group.rank()]} rows; got kv "
            f"{tuple(kv.shape)}. Split by the same plan."
        )
    q, kv = autocast(q), autocast(kv)
    groups = _checked_groups(q, kv, rows)
    sequence.check_tokens(group, q=q)
    check_alike(q=q, kv=kv)
    check_sinks(sinks, q)
    if indices is not None:
        _check_indices(indices, q, groups)
    check_factors(scale=scale)
    facts = {
        "plan": sequence.fingerprint,
        "entries": entries.fingerprint,
        "rows": rows,
        "scale": scale,
        "sinks": sinks is not None,
        **({} if sinks is None else facts_of("sinks", sinks)),
    }
    return facts | facts_of("q", q) | facts_of("kv", kv)


def _checked_groups(q: Tensor, kv: Tensor, rows: Rows) -> int:
    shapes = f"q {tuple(q.shape)}, kv {tuple(kv.shape)}"
    if q.ndim != 3 or kv.ndim not in (2, 3) or 0 in (*q.shape[1:], *kv.shape[1:]):
        raise ShapeError(
            "q must be [local_tokens, heads, key_dim], and kv [local_tokens, width] or "
            f"[local_tokens, groups, width]; got {shapes}."
        )
    groups = kv.shape[1] if kv.ndim == 3 else 1
    if q.shape[2] != rows.key_dim or kv.shape[-1] < rows.width or q.shape[1] % groups:
        raise ShapeError(
            f"{rows} needs q of {rows.key_dim} columns and kv of {rows.width}, and groups that "
            f"divide the heads; got {shapes}."
        )
    return groups


def _check_indices(indices: Tensor, q: Tensor, groups: int) -> None:
    if indices.dtype != torch.int32 or indices.ndim != 3 or indices.shape[:2] != (len(q), groups):
        raise ShapeError(
            f"indices must be [{len(q)}, {groups}, k] of torch.int32; got {tuple(indices.shape)} "
            f"of {indices.dtype}. A selector returns a list for each group of kv; TopK returns one."
        )
    if not indices.shape[2] or indices.device != q.device:
        raise ShapeError(
            f"indices need at least one id per query, on {q.device}; got {tuple(indices.shape)} "
            f"on {indices.device}."
        )
