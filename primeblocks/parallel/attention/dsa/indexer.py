"""Scores of an indexer, and the selection of the tokens with the highest scores.

Queries are scored in chunks, because the scores of all queries would take too much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ....errors import ShapeError, check_counts
from ....groups import check_tensors
from ...sequence import SequencePlan
from ..kernel import accumulator_dtype

__all__ = [
    "BYTES_OF_A_SCORE",
    "Candidates",
    "IndexScores",
    "IndexerInputs",
    "Selector",
    "TopK",
    "best_candidates",
    "check_indexer",
    "check_scored",
    "index_scores",
    "keep_indices",
    "select",
    "top_candidates",
    "top_ids",
]

# Bytes per candidate and query: scores, the scores of one head, two masks and counts.
BYTES_OF_A_SCORE = 18


class IndexerInputs(NamedTuple):
    """Queries, keys and weights of an indexer, with rotary embedding applied.

    The score of query t and key s is the sum over heads h of
    `weights[t, h] * relu(q[t, h] . k[s])`.
    """

    q: Tensor
    """`[local_tokens, index_heads, index_dim]`"""
    k: Tensor
    """`[local_tokens, index_dim]`, shared by all heads. For a selector of entries, their keys."""
    weights: Tensor
    """`[local_tokens, index_heads]`, multiplied by all constant factors"""


class IndexScores(Protocol):
    """A function that computes the scores of queries and keys. Local."""

    def __call__(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Return scores `[queries, candidates]` in float32, or in float64 for float64 operands.

        Args:
            q: `[queries, index_heads, index_dim]`.
            k: `[candidates, index_dim]`.
            weights: `[queries, index_heads]`.
        """
        ...


def check_scored(q: Tensor, k: Tensor, weights: Tensor) -> str:
    """Raise ShapeError if an indexer's operands do not fit each other, or return their shapes."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, weights {tuple(weights.shape)}"
    if not (
        (q.ndim, k.ndim, weights.ndim) == (3, 2, 2)
        and q.shape[:2] == weights.shape
        and q.shape[2] == k.shape[1]
    ):
        raise ShapeError(
            "an indexer's q must be [queries, index_heads, index_dim], k [candidates, index_dim] "
            f"and weights [queries, index_heads]; got {shapes}."
        )
    return shapes


class Selector(Protocol):
    """A rule by which queries choose rows."""

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        *,
        sequence: SequencePlan,
        rank: int,
        scores: IndexScores,
    ) -> Tensor:
        """Return the selection, int32 `[local_tokens, groups, k]`, as `select` returns it."""
        ...


@dataclass(frozen=True)
class TopK:
    """For each query, select the `k` tokens with the highest scores.

    Only tokens of the query's document up to the query itself are candidates. If tokens have equal
    scores, the earlier token is selected. `TopK` is the selection of DeepSeek-V3.2 and GLM-5. It
    returns one list per query, so `kv` must have one group.

    Attributes:
        k: the maximum number of tokens that a query selects.
        chunk_bytes: bytes of memory for a chunk of scores. The matrix of all scores is never
            stored.
    """

    k: int
    chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        check_counts(k=self.k, chunk_bytes=self.chunk_bytes)

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        *,
        sequence: SequencePlan,
        rank: int,
        scores: IndexScores,
    ) -> Tensor:
        runs = [
            Candidates(run.offset, run.stop - run.start, run.document, run.start - run.document)
            for run in sequence.runs(rank)
        ]
        found = top_candidates(
            q, weights, keys, runs, self.k, scores=scores, chunk_bytes=self.chunk_bytes
        )
        return found.unsqueeze(1)


def select(
    indexer: IndexerInputs,
    keys: Tensor,
    *,
    selector: Selector,
    sequence: SequencePlan,
    rank: int,
    scores: IndexScores | None = None,
) -> Tensor:
    """Select the rows that each query of this rank attends to. Local. No gradient.

    A checkpointed layer selects again when the layer is recomputed, unless the checkpoint uses
    `keep_indices`.

    Args:
        keys: `[tokens, index_dim]`, the keys of all ranks in the order of the sequence. If the
            selector selects entries, which are computed from several tokens, pass the keys of the
            entries.
        scores: the function that computes the scores. Default: `index_scores`.

    Returns:
        Int32 `[local_tokens, groups, k]`: ascending indices of rows of the whole kv, which are
        tokens or entries, followed by -1. A NaN score counts as infinite, so its row is selected.
        A NaN in this row then reaches the output.

    Raises:
        ShapeError, UnsupportedError: the operands do not fit the selector.
    """
    score = index_scores if scores is None else scores

    def choose() -> Tensor:
        # In float32 under autocast too, because rounded scores would select other tokens.
        with torch.no_grad(), torch.autocast(indexer.q.device.type, enabled=False):
            return selector.select(
                indexer.q, indexer.weights, keys, sequence=sequence, rank=rank, scores=score
            )

    call = _CALL.set(choose)
    try:
        return torch.ops.primeblocks.select_indices(indexer.q.detach())
    finally:
        _CALL.reset(call)


def keep_indices() -> Any:
    """Return contexts in which `torch.utils.checkpoint` stores selections. Local.

    All results except selections are recomputed. A recomputation could sum a score in another
    order, and select other rows if scores are nearly equal. The gradients would then belong to
    other rows than the output.

    Pass this function: `checkpoint(..., use_reentrant=False, context_fn=keep_indices)`. The
    contexts store the indices of each layer that selects.
    """
    return create_selective_checkpoint_contexts([torch.ops.primeblocks.select_indices.default])


# Checkpointing keeps results of operators, and operators take only tensors and numbers. So the
# operator finds its call here. If a recomputation knows the result, the operator does not run.
_CALL: ContextVar[Callable[[], Tensor]] = ContextVar("the call of select_indices")


@torch.library.custom_op(
    "primeblocks::select_indices", mutates_args=(), schema="(Tensor q) -> Tensor"
)
def _select_indices(q: Tensor) -> Tensor:
    return _CALL.get()()


class Candidates(NamedTuple):
    """Consecutive queries of one document and the candidates that they see.

    Query `i` of `queries` has the position `position + i` in its document, and sees the
    `(position + i + 1) // ratio` candidates from `first` on.
    """

    offset: int
    queries: int
    first: int
    position: int
    ratio: int = 1

    @property
    def most(self) -> int:
        """The number of candidates that the last query sees."""
        return (self.position + self.queries) // self.ratio


def top_candidates(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    runs: list[Candidates],
    k: int,
    *,
    scores: IndexScores,
    chunk_bytes: int,
) -> Tensor:
    """Select the `k` best candidates of each query: int32 `[queries, k]`, as `select` does."""

    def table(rows: slice, run: Candidates) -> Tensor:
        return scores(q[rows], keys[run.first : run.first + run.most], weights[rows])

    return best_candidates(table, runs, k, like=q, chunk_bytes=chunk_bytes)


def best_candidates(
    table: Callable[[slice, Candidates], Tensor],
    runs: list[Candidates],
    k: int,
    *,
    like: Tensor,
    chunk_bytes: int,
) -> Tensor:
    """Select like `top_candidates`, by the scores that `table` returns.

    Args:
        table: a function from a slice of queries and their `Candidates` to scores
            `[queries, run.most]`. Scores of candidates that a query does not see may have any
            value. `best_candidates` overwrites the scores.
        like: a tensor with one row per query, on the device of the scores.
    """
    found = torch.full((like.shape[0], k), -1, dtype=torch.int32, device=like.device)
    for rows, run in _chunks(runs, k, chunk_bytes):
        seen = torch.arange(run.position + 1, run.position + run.queries + 1, device=like.device)
        seen = seen.div(run.ratio, rounding_mode="floor")[:, None]
        if run.most <= k:
            ids = torch.arange(run.most, device=like.device)
            found[rows, : run.most] = (ids + run.first).where(ids < seen, -1).to(torch.int32)
            continue
        future = torch.arange(run.most, device=like.device) >= seen
        ids = top_ids(table(rows, run).masked_fill_(future, -torch.inf), k)
        found[rows] = torch.where(ids >= 0, ids + run.first, ids)
    return found


def _chunks(runs: list[Candidates], k: int, chunk_bytes: int) -> Iterator[tuple[slice, Candidates]]:
    """Cut runs so that a chunk's scores fit into `chunk_bytes`, and before the first query that
    sees more than `k` candidates.
    """
    for run in runs:
        start, free = 0, max(0, min(run.queries, k * run.ratio + run.ratio - 1 - run.position))
        while start < run.queries:
            if start < free:
                stop = free
            else:
                stop = start + max(1, chunk_bytes // (BYTES_OF_A_SCORE * run.most))
            stop = min(stop, run.queries)
            offset, position = run.offset + start, run.position + start
            part = run._replace(offset=offset, queries=stop - start, position=position)
            yield slice(offset, run.offset + stop), part
            start = stop


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Compute the scores of queries and keys head by head: `IndexScores` in plain torch. Local."""
    dtype = accumulator_dtype(q)
    keys, weights = k.to(dtype).T, weights.to(dtype)
    total = torch.zeros(q.shape[0], k.shape[0], dtype=dtype, device=q.device)
    for head in range(q.shape[1]):
        of_head = (q[:, head].to(dtype) @ keys).relu_()
        total.addcmul_(of_head, weights[:, head, None])
    return total


def top_ids(scores: Tensor, k: int) -> Tensor:
    """Return `[rows, k]`, the columns of each row's `k` highest scores, ascending, followed by -1.

    If columns have equal scores, the first column is selected. A score of -inf is never selected,
    and NaN counts as infinite. The host does not wait. If columns have equal scores, `torch.topk`
    alone may select any of these columns. Equal scores are common, because the ReLU of an indexer
    returns exact zeros. `scores` are overwritten.
    """
    rows, columns = scores.shape
    taken = min(k, columns)
    scores = scores.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = scores.topk(taken, dim=1, sorted=False).values.amin(1, keepdim=True)
    above = scores > least
    tied = (scores == least) & (scores > -torch.inf)
    room = taken - above.sum(1, keepdim=True)
    above |= tied & (tied.cumsum(1, dtype=torch.int32) <= room)
    # The column at which the count of selected columns reaches 1, 2, ...
    counts = above.cumsum(1, dtype=torch.int32)
    wanted = torch.arange(1, k + 1, dtype=torch.int32, device=scores.device).expand(rows, k)
    found = torch.searchsorted(counts, wanted.contiguous(), out_int32=True)
    return found.masked_fill_(found >= columns, -1)


def check_indexer(indexer: IndexerInputs, tokens: int) -> None:
    """Refuse operands that do not fit each other or this rank's number of tokens. Local."""
    q, k, weights = indexer
    check_tensors(index_q=q, index_k=k, index_weights=weights)
    shapes = check_scored(q, k, weights)
    if not len(q) == len(k) == tokens:
        raise ShapeError(f"the indexer's {shapes} do not fit this rank's {tokens} tokens.")
    for name, x in (("q", q), ("k", k), ("weights", weights)):
        if not x.is_floating_point():
            raise ShapeError(f"the indexer's {name} must be floating point; got {x.dtype}.")
    if q.dtype != k.dtype or not q.device == k.device == weights.device:
        raise ShapeError(
            f"the indexer's q and k need one dtype and one device; got {q.dtype} on {q.device}, "
            f"{k.dtype} on {k.device}, weights on {weights.device}."
        )
