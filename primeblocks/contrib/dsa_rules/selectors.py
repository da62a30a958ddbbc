"""Rules by which queries choose rows: tokens, pools of tokens, tiles of keys, entries.

Each rule is a value for `select(..., selector=)`. Its result is canonical: ids ascend without gaps
and are followed by -1. Ties go to the earlier candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import PlanError, UnsupportedError, check_counts
from ...parallel.attention.dsa.indexer import (
    Candidates,
    IndexScores,
    best_candidates,
    index_scores,
    top_candidates,
)
from ...parallel.attention.kernel import accumulator_dtype
from ...parallel.sequence import SequencePlan
from .entries import plan_entries
from .ids import (
    Queries,
    check_operands,
    first_entries,
    join_ids,
    queries_of,
    spread,
    stretch,
)

__all__ = ["TopEntries", "TopPools", "TopTiles", "all_entries"]


@dataclass(frozen=True)
class TopPools:
    """Select all tokens of the pools with the highest scores, and the query's incomplete pool.

    A pool is `pool` neighbouring tokens of a document. Each entry of `plan_entries(sequence, pool)`
    is the key of one pool. A query selects at most `k // pool` pools, among the pools that end at
    or before the query. `TopPools` is the rule of GLM-5.3-Flash.

    `select` reads keys `[entries, index_dim]` and returns positions of tokens in the whole
    sequence, `[local_tokens, 1, columns]`. The number of columns is `k // pool * pool + pool - 1`.
    The tokens of the query's own incomplete pool, up to the query, follow the tokens of the
    selected pools.

    Attributes:
        k: the largest number of tokens that a query selects from complete pools.
        pool: the number of tokens per pool.
        chunk_bytes: as in `TopK`.
    """

    k: int
    pool: int
    chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.pool < 1 or self.k < self.pool or self.chunk_bytes < 1:
            raise PlanError(
                f"TopPools needs pool >= 1, k >= pool and chunk_bytes >= 1; got {self}."
            )

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
        pools = _top_entries(q, weights, keys, self.k // self.pool, self.pool, sequence, rank,
                             scores, self.chunk_bytes)  # fmt: skip
        most = pools.shape[1] * self.pool + self.pool - 1
        found = torch.empty(q.shape[0], 1, most, dtype=torch.int32, device=q.device)
        own = queries_of(sequence, rank, self.pool, q.device)
        for rows, some in own.chunks(most, self.chunk_bytes):
            tokens = spread(pools[rows], some.first_entry, some.document, self.pool)
            tail = stretch(some, some.begun(self.pool), self.pool - 1)
            found[rows, 0] = join_ids(tokens, tail)
        return found


@dataclass(frozen=True)
class TopEntries:
    """For each query, select the last `window` tokens and the `k` entries with the highest scores.

    An entry of `plan_entries(sequence, ratio)` represents `ratio` tokens. A query can select an
    entry if the last token of the entry is at or before the query. `TopEntries` is the rule of
    DeepSeek-V4 (CSA).

    `select` reads keys `[entries, index_dim]` and returns ids `[local_tokens, 1, window + k]` of
    rows in the plan from `tokens_and_entries`. The id of a token is its position in the whole
    sequence, and the id of entry e is `sequence.tokens + e`.

    Attributes:
        k: the largest number of entries that a query selects.
        ratio: the number of tokens per entry.
        window: the number of tokens that a query always selects: its own token and the tokens
            directly before its own token.
        chunk_bytes: as in `TopK`.
    """

    k: int
    ratio: int
    window: int
    chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if min(self.k, self.ratio, self.chunk_bytes) < 1 or self.window < 0:
            raise PlanError(
                "TopEntries needs k, ratio and chunk_bytes of at least 1 and window >= 0; "
                f"got {self}. For a layer that attends to all entries, call all_entries."
            )

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
        chosen = _top_entries(
            q, weights, keys, self.k, self.ratio, sequence, rank, scores, self.chunk_bytes
        )
        found = torch.empty(q.shape[0], 1, self.window + self.k, dtype=torch.int32, device=q.device)
        own = queries_of(sequence, rank, self.ratio, q.device)
        for rows, some in own.chunks(found.shape[2], self.chunk_bytes):
            found[rows, 0] = _behind_window(some, chosen[rows], self.window, sequence.tokens)
        return found


@dataclass(frozen=True)
class TopTiles:
    """Select all tokens of the tiles with the highest scores, for each key head separately.

    A tile is `tile_tokens` neighbouring tokens of a document. In its own tile, a query selects only
    tokens up to itself. The score of a tile is the highest score of its tokens. The score of token
    s for query t is `weights[t, group] * q[t, group] . k[s]`, without ReLU. If all weights are 1,
    `TopTiles` is the rule of MiniMax M3 (MSA).

    `select` reads `q [local_tokens, groups, index_dim]`, with one index head per key head, and keys
    `[tokens, index_dim]`. The result is `[local_tokens, groups, budget * tile_tokens]`. Do not pass
    `scores=` to `dsa_attention` or `dsa.select`, because `TopTiles` computes its own scores.

    Attributes:
        budget: the largest number of tiles that a query selects, local tiles included.
        tile_tokens: the number of tokens per tile.
        local: the number of tiles that a query always selects: its own tile and the tiles directly
            before its own tile.
        chunk_bytes: as in `TopK`.
    """

    budget: int
    tile_tokens: int
    local: int = 1
    chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        sound = self.budget >= 1 and self.tile_tokens >= 1 and self.chunk_bytes >= 1
        if not sound or not 0 <= self.local <= self.budget:
            raise PlanError(
                "TopTiles needs budget, tile_tokens and chunk_bytes of at least 1, and "
                f"0 <= local <= budget; got {self}."
            )

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
        if scores is not index_scores:
            raise UnsupportedError(
                "TopTiles computes its own scores, without a ReLU. Leave out scores=."
            )
        check_operands(
            q, weights, keys,
            tokens=sequence.counts[rank], candidates=sequence.tokens, what="tokens",
        )  # fmt: skip
        size, most = self.tile_tokens, self.budget * self.tile_tokens
        found = torch.empty(*q.shape[:2], most, dtype=torch.int32, device=q.device)
        own = queries_of(sequence, rank, size, q.device)
        # Candidates are tiles, numbered from the document's first token. A query sees its own
        # tile: as many tiles as are complete `size - 1` tokens later.
        runs = [
            Candidates(run.offset, run.stop - run.start, run.document,
                       run.start - run.document + size - 1, size)
            for run in sequence.runs(rank)
        ]  # fmt: skip
        for group in range(q.shape[1]):
            tiles = best_candidates(
                _TileScores(q[:, group], weights[:, group, None], keys, size, self.local),
                runs,
                self.budget,
                like=q,
                chunk_bytes=self.chunk_bytes // size,
            )
            for rows, some in own.chunks(most, self.chunk_bytes):
                tokens = spread(tiles[rows], some.document, some.document, size)
                found[rows, group] = tokens.masked_fill_(tokens > some.place, -1)
        return found


def all_entries(
    sequence: SequencePlan,
    rank: int,
    *,
    ratio: int,
    window: int,
    device: torch.device | str = "cpu",
    chunk_bytes: int = 64 << 20,
) -> Tensor:
    """For each query, return the ids of the last `window` tokens and of all earlier entries. Local.

    Use this function for layers without an indexer, such as DeepSeek-V4's HCA. `TopEntries` selects
    the same ids if `k` is at least the number of entries of every document.

    Returns:
        Int32 ids `[local_tokens, 1, window + entries]`, where `entries` is the number of entries of
        the longest document.

    Raises:
        PlanError: `ratio` is below 1, or `window` is below 0.
    """
    check_counts(ratio=ratio, chunk_bytes=chunk_bytes)
    check_counts(least=0, window=window)
    # Attention needs at least one column.
    most = max([1, *(length // ratio for length in sequence.document_lengths)])
    own = queries_of(sequence, rank, ratio, torch.device(device))
    found = torch.empty(len(own.place), 1, window + most, dtype=torch.int32, device=device)
    entries = torch.arange(most, dtype=torch.int32, device=device)
    for rows, some in own.chunks(window + most, chunk_bytes):
        ids = torch.where(entries * ratio < some.begun(ratio), some.first_entry + entries, -1)
        found[rows, 0] = _behind_window(some, ids, window, sequence.tokens)
    return found


def _top_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    k: int,
    ratio: int,
    sequence: SequencePlan,
    rank: int,
    scores: IndexScores,
    chunk_bytes: int,
) -> Tensor:
    """Return `[queries, k]`: ids of entries."""
    check_operands(
        q, weights, keys,
        tokens=sequence.counts[rank], candidates=plan_entries(sequence, ratio).tokens,
        what=f"entries of {ratio} tokens",
    )  # fmt: skip
    first = first_entries(sequence, ratio)
    runs = [
        Candidates(run.offset, run.stop - run.start, first[run.document],
                   run.start - run.document, ratio)
        for run in sequence.runs(rank)
    ]  # fmt: skip
    return top_candidates(q, weights, keys, runs, k, scores=scores, chunk_bytes=chunk_bytes)


def _behind_window(some: Queries, entries: Tensor, window: int, tokens: int) -> Tensor:
    last = stretch(some, (some.position - (window - 1)).clamp_min_(0), window)
    return join_ids(last, torch.where(entries >= 0, entries + tokens, -1))


@dataclass(frozen=True)
class _TileScores:
    """The scores of all tiles that some queries see, for one index head."""

    q: Tensor
    weights: Tensor
    keys: Tensor
    size: int
    local: int

    def __call__(self, rows: slice, run: Candidates) -> Tensor:
        position = run.position - (self.size - 1)
        tokens = position + run.queries
        dtype = accumulator_dtype(self.q)
        queries = self.q[rows].to(dtype) * self.weights[rows].to(dtype)
        scores = queries @ self.keys[run.first : run.first + tokens].to(dtype).T
        future = torch.ones(run.queries, run.queries, dtype=torch.bool, device=scores.device)
        scores[:, position:].masked_fill_(future.triu_(1), -torch.inf)
        whole = tokens // self.size
        best = scores[:, : whole * self.size].unflatten(1, (whole, self.size)).amax(2)
        if whole < run.most:
            begun = scores[:, whole * self.size :].amax(1, keepdim=True)
            best = torch.cat([best, begun], dim=1)
        own = torch.arange(position, tokens, device=scores.device)[:, None] // self.size
        tiles = torch.arange(run.most, device=scores.device)
        return best.masked_fill_((tiles <= own) & (tiles > own - self.local), torch.inf)
