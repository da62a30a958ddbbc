"""Tiles of keys, selected by their best key, for each key head separately."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import PlanError, UnsupportedError
from ...parallel.attention.dsa.indexer import Candidates, IndexScores, best_candidates, index_scores
from ...parallel.attention.kernel import accumulator_dtype
from ...parallel.sequence import SequencePlan
from .ids import check_operands, queries_of, spread

__all__ = ["TopTiles"]


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
