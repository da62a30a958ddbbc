"""One hop of attention: the queries of one rank, the keys of one rank, and the kernel protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..sequence import SequencePlan, kept_on_plan

__all__ = [
    "AttentionKernel",
    "AttentionSpec",
    "Hop",
    "accumulator_dtype",
    "chains",
    "rows_before",
    "seen_ranges",
    "seen_rows",
]


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which to sum numbers of the dtype of `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class AttentionSpec:
    """Rules of one attention call: the keys that a query sees, and how scores are computed.

    Attributes:
        plan: the plan of documents and ranks. A query sees its own document, and the documents that
            its own document continues.
        causal: with `causal=True`, a token sees only itself and earlier tokens.
        scale: the factor by which scores are multiplied.
        window: a token sees only itself and the previous `window - 1` tokens, by position.
            `window=None` means no window.
        softcap: scores become `softcap * tanh(score / softcap)`. With `softcap=None`, scores stay
            unchanged.
    """

    plan: SequencePlan
    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None

    def hop(self, query_rank: int, key_rank: int) -> Hop:
        """Describe the queries of `query_rank` and the keys of the same or another rank. Pure."""
        return Hop(self, query_rank, key_rank)


@dataclass(frozen=True)
class Hop:
    """A part of an attention call: queries of one rank, and keys of the same or another rank.

    A rank keeps its tokens in the order of the whole sequence. The keys that a query sees are
    therefore consecutive rows, for every order and window, unless documents fork (the plan has
    `parents`). If documents fork, `Ancestry` determines the rows that a query sees.
    """

    spec: AttentionSpec
    query_rank: int
    key_rank: int

    @property
    def pairs(self) -> int:
        """Return the number of pairs of a query and a visible key. Pure.

        The plan caches the result.
        """
        found = _pairs(self.spec.plan, self.query_rank, self.spec.causal, self.spec.window)
        return found[self.key_rank]

    def seen_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two int32 arrays `[queries]`: the first visible row of keys, and the row after the
        last visible row. Pure.

        Raises:
            UnsupportedError: documents fork, so the visible rows are not consecutive.
        """
        plan, causal, window = self.spec.plan, self.spec.causal, self.spec.window
        return seen_rows(plan, self.query_rank, self.key_rank, causal, window)


@runtime_checkable
class AttentionKernel(Protocol):
    """Forward and backward of one hop, one call each. Local.

    Ring attention makes one hop per rank, and merges the results. Hops in which no query sees a key
    are skipped. Ulysses attention makes one hop. Query head h reads key head
    `h // (heads // key_heads)`. A hop has at least one query and one key. Some queries of a hop may
    see no key.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, hop: Hop) -> tuple[Tensor, Tensor]:
        """Return the output, and the logarithm (base e) of the sum of exponentials, `lse`.

        The caller may overwrite the output and `lse`. A query without keys has an output of 0 and
        an `lse` of -inf.

        Args:
            q: `[queries, heads, head_dim]`.
            k: `[keys, key_heads, head_dim]`.
            v: `[keys, key_heads, value_dim]`.
            hop: the keys that a query sees, and the rules for scores.

        Returns:
            The output, `[queries, heads, value_dim]` in the dtype of q or of `lse`, and the `lse`,
            `[queries, heads]` in float32, or in float64 for float64 operands.
        """
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this hop's part of the gradients of q, k and v.

        The kernel returns gradients in the dtype of q or in the dtype of `lse`. The caller may
        overwrite the gradients. `grad`, `out` and `lse` are values of the whole call, and cover the
        keys of all hops and the sinks.
        """
        ...


@kept_on_plan
def _pairs(
    plan: SequencePlan, query_rank: int, causal: bool, window: int | None
) -> tuple[int, ...]:
    if plan.parents is not None:
        return _pairs_of_tree(plan, query_rank, window)
    seen = (seen_rows(plan, query_rank, rank, causal, window) for rank in range(plan.ranks))
    return tuple(int((last - first).sum(dtype=np.int64)) for first, last in seen)


def seen_rows(
    plan: SequencePlan, query_rank: int, key_rank: int, causal: bool, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    if plan.parents is not None:
        raise UnsupportedError(
            "this kernel reads one range of keys per query, and the plan has documents that fork. "
            "Use kernel=FlexKernel() or kernel=RectangleKernel(), or pack whole rollouts."
        )
    queries = plan.indices(query_rank).numpy()
    first = plan.document_starts(query_rank).numpy()
    if causal:
        stop = queries + 1
    else:
        starts = np.cumsum([0, *plan.document_lengths])
        stop = starts[np.searchsorted(starts, first, side="right")]
    if window is not None:
        first = np.maximum(first, queries - window + 1)
    return rows_before(plan, key_rank, first), rows_before(plan, key_rank, stop)


def seen_ranges(
    plan: SequencePlan, key_rank: int, start: int, stop: int, window: int | None
) -> list[tuple[int, int]]:
    """Return the rows of keys that tokens `[start, stop)` of one chain see, as ranges. Pure.

    The ranges ascend by position. Each token sees the rows of the ranges up to its own position,
    except rows that the window hides.
    """
    depth = int(plan.ancestry.depths[start])
    least = 0 if window is None else max(depth - window + 1, 0)
    places = [*plan.ancestry.before(start, least=least), (start, stop)]
    found: list[tuple[int, int]] = []
    for first, last in rows_before(plan, key_rank, np.array(places)).tolist():
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        elif first < last:
            found.append((first, last))
    return found


def chains(plan: SequencePlan, rank: int) -> list[tuple[int, int, int]]:
    """Return the runs of a rank as chains: a run that continues the previous run is joined to it.

    A chain has a start, a stop and the row of its first token. Inside a chain each token sees the
    previous token. Pure.
    """
    found: list[tuple[int, int, int]] = []
    for start, stop, _, row in plan.runs(rank):
        if found and found[-1][1] == start and start < plan.ancestry.ends[start - 1]:
            found[-1] = (found[-1][0], stop, found[-1][2])
        else:
            found.append((start, stop, row))
    return found


def _pairs_of_tree(plan: SequencePlan, query_rank: int, window: int | None) -> tuple[int, ...]:
    found = []
    for key_rank in range(plan.ranks):
        of_keys, count = plan.positions(key_rank).numpy(), 0
        for start, stop, _ in chains(plan, query_rank):
            ranges = seen_ranges(plan, key_rank, start, stop, window)
            seen = np.concatenate([of_keys[:0], *(of_keys[a:b] for a, b in ranges)])
            queries = plan.ancestry.depths[start:stop]
            last = np.searchsorted(seen, queries, side="right")
            hidden = 0 if window is None else np.searchsorted(seen, queries - window, side="right")
            count += int((last - hidden).sum())
        found.append(count)
    return tuple(found)


def rows_before(plan: SequencePlan, rank: int, places: np.ndarray) -> np.ndarray:
    """Return the number of a rank's rows before each place, int32. Searches pieces, not rows."""
    starts, stops = np.asarray(plan.pieces[rank], np.int64).reshape(-1, 2).T
    rows, stops = (np.concatenate([[0], x]) for x in (np.cumsum(stops - starts), stops))
    piece = np.searchsorted(starts, places, side="right")
    return (rows[piece] - np.maximum(stops[piece] - places, 0)).astype(np.int32)
