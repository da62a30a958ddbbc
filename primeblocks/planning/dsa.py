"""Formulas for the costs of sparse attention that is split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..parallel import SequencePlan
from ..parallel.attention.dsa.indexer import BYTES_OF_A_SCORE

__all__ = ["DsaPlan", "DsaSizes", "dsa_cost", "plan_dsa"]


@dataclass(frozen=True)
class DsaSizes:
    """The sizes of a model with an indexer.

    GLM-5.2 is `DsaSizes(heads=64, index_heads=32, layers=78, index_layers=21)`. DeepSeek-V3.2 is
    `DsaSizes(heads=128, index_heads=64, layers=61, index_layers=61)`.

    Attributes:
        heads: number of attention heads.
        index_heads: number of heads of the indexer.
        layers: number of layers with sparse attention.
        index_layers: number of layers that select tokens. All other layers reuse a selection.
        top_k: maximum number of tokens that a query selects.
        key_dim: columns of a row that ranks send: latent and rotated part.
        value_dim: columns of a row that are the value.
        index_dim: columns of a key of the indexer.
        row_bytes: bytes per number in a row.
        index_bytes: bytes per number in a key of the indexer.
        index_speed: the indexer's FLOPs per second, divided by the FLOPs per second of attention.
            Kernels in float8 need a larger value than the default.

    Raises:
        PlanError: a number of heads, layers or tokens, or `index_speed`, is out of range.
    """

    heads: int
    index_heads: int
    layers: int
    index_layers: int
    top_k: int = 2048
    key_dim: int = 576
    value_dim: int = 512
    index_dim: int = 128
    row_bytes: int = 2
    index_bytes: int = 2
    index_speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.index_layers <= self.layers or min(self.heads, self.top_k) < 1:
            raise PlanError(
                "DsaSizes needs 0 <= index_layers <= layers, heads >= 1 and top_k >= 1; got "
                f"{self.index_layers}, {self.layers}, {self.heads}, {self.top_k}."
            )
        if self.index_speed <= 0:
            raise PlanError(f"index_speed must be positive; got {self.index_speed}.")


# Backward computes scores and their gradients, and those of queries, keys and values. That makes
# five products, and forward makes two.
_FORWARD_AND_BACKWARD = 3.5


def dsa_cost(sizes: DsaSizes) -> Callable[[np.ndarray], np.ndarray]:
    """Return a `cost` for `plan_sequence`: a function from positions to costs of tokens. Pure.

    The unit is FLOPs of attention, for forward and backward of all layers. Attention reads
    `min(position + 1, top_k)` rows. If a query sees more than `top_k` tokens, the indexer first
    scores all of these tokens once.
    """

    def cost(positions: np.ndarray) -> np.ndarray:
        seen = positions + 1.0
        indexer, attention = _flops(sizes, seen)
        return (
            sizes.index_layers * indexer / sizes.index_speed
            + sizes.layers * _FORWARD_AND_BACKWARD * attention
        )

    return cost


def _flops(sizes: DsaSizes, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return forward FLOPs of one layer's indexer and attention, by the tokens that queries see."""
    scored = np.where(seen > sizes.top_k, seen, 0.0)
    indexer = 2.0 * sizes.index_heads * sizes.index_dim * scored
    read = np.minimum(seen, sizes.top_k)
    return indexer, 2.0 * sizes.heads * (sizes.key_dim + sizes.value_dim) * read


@dataclass(frozen=True)
class DsaPlan:
    """Costs of a layer for one rank, in bytes and FLOPs. The result of `plan_dsa`.

    Attributes:
        gather_bytes: bytes that a rank receives in the forward of a layer without indexer.
        index_gather_bytes: additional bytes that a rank receives in a layer with an indexer, in the
            same collective as the rows.
        scatter_bytes: bytes of gradients that a rank receives in backward. Backward also gathers
            the rows again.
        indexer_flops: forward FLOPs of the indexer on the busiest rank.
        attention_flops: forward FLOPs of attention on the busiest rank.
        max_over_mean: the busiest rank's cost divided by the mean cost, for all layers, forward and
            backward.
        score_bytes: the maximum memory, in bytes, to score a chunk of queries and select their
            tokens.
        full_score_bytes: bytes of all scores, `[local_tokens, tokens]` in float32, which are never
            stored together.
        indices_bytes: bytes of a selection in int32.
    """

    gather_bytes: int
    index_gather_bytes: int
    scatter_bytes: int
    indexer_flops: float
    attention_flops: float
    max_over_mean: float
    score_bytes: int
    full_score_bytes: int
    indices_bytes: int

    @property
    def score_fraction(self) -> float:
        return self.score_bytes / self.full_score_bytes if self.full_score_bytes else 0.0

    def table(self) -> str:
        """Return one line for each cost."""
        mib = {
            "received forward, rows": self.gather_bytes,
            "received forward, index keys": self.index_gather_bytes,
            "received backward, rows again": self.gather_bytes,
            "received backward, gradients": self.scatter_bytes,
            "scores at once": self.score_bytes,
            "full score matrix (not made)": self.full_score_bytes,
            "selected indices": self.indices_bytes,
        }
        lines = [f"{name:<32}{size / 2**20:>12,.1f} MiB" for name, size in mib.items()]
        lines.append(f"{'indexer, forward':<32}{self.indexer_flops / 1e12:>12,.2f} TFLOP")
        lines.append(f"{'attention, forward':<32}{self.attention_flops / 1e12:>12,.2f} TFLOP")
        lines.append(f"{'busiest rank over mean':<32}{self.max_over_mean:>12.4f}")
        return "\n".join(lines)


def plan_dsa(sequence: SequencePlan, sizes: DsaSizes, *, chunk_bytes: int = 64 << 20) -> DsaPlan:
    """Compute the traffic, FLOPs and memory of one layer of sparse attention on one rank. Pure.

    `chunk_bytes` is the argument `chunk_bytes` of `TopK`.
    """
    others, most = sequence.ranks - 1, max(sequence.counts)
    cost = dsa_cost(sizes)
    indexer, attention, costs, scores, full = [], [], [], [], []
    for rank in range(sequence.ranks):
        seen = sequence.positions(rank).numpy() + 1.0
        of_indexer, of_attention = _flops(sizes, seen)
        indexer.append(float(of_indexer.sum()))
        attention.append(float(of_attention.sum()))
        costs.append(float(cost(seen - 1.0).sum()))
        longest = int(seen.max(initial=0.0))
        one = BYTES_OF_A_SCORE * longest
        all_rows = one * sequence.counts[rank]
        scores.append(min(all_rows, max(one, chunk_bytes)) if longest > sizes.top_k else 0)
        full.append(sequence.counts[rank] * sequence.tokens * 4)
    mean = sum(costs) / len(costs)
    return DsaPlan(
        gather_bytes=others * most * sizes.key_dim * sizes.row_bytes,
        index_gather_bytes=others * most * sizes.index_dim * sizes.index_bytes,
        scatter_bytes=others * most * sizes.key_dim * 4,
        indexer_flops=max(indexer),
        attention_flops=max(attention),
        max_over_mean=max(costs) / mean if mean else 1.0,
        score_bytes=max(scores),
        full_score_bytes=max(full),
        indices_bytes=most * sizes.top_k * 4,
    )
