"""Rectangles in which queries meet keys, when both lie scattered over ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..sequence import SequencePlan

__all__ = ["Rectangle", "mask_of", "rectangles"]

# Long runs are cut for windowed attention: a mask is as wide as its queries and the window.
_WINDOW_ROWS = 128


class Rectangle(NamedTuple):
    """A rectangle of the attention matrix: rows of the query rank, rows of the key rank.

    `kind` is "full" (every query sees every key), "causal" (a square, query i sees keys up to i)
    or "masked" (`mask_of` says).
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    kind: str

    @property
    def queries(self) -> slice:
        return slice(self.query_start, self.query_stop)

    @property
    def keys(self) -> slice:
        return slice(self.key_start, self.key_stop)


# The layers of one batch ask alike; the next batch has another plan.
@lru_cache(maxsize=256)
def rectangles(
    plan: SequencePlan, *, query_rank: int, key_rank: int, causal: bool, window: int | None
) -> tuple[Rectangle, ...]:
    """The rectangles in which a rank's queries meet another rank's keys. Pure.

    A document's keys lie side by side on each rank, and a run's past keys are a prefix of them,
    so a run of queries needs one rectangle, and a second one where it meets itself.
    """
    places = _places(plan, key_rank)
    starts = np.cumsum([0, *plan.document_lengths])

    def rectangle(start: int, stop: int, offset: int, low: int, high: int, kind: str) -> Rectangle:
        """Turn places in the sequence into rows."""
        first, last = np.searchsorted(places, [low, high])
        return Rectangle(offset, offset + stop - start, int(first), int(last), kind)

    found = []
    for start, stop, document, offset in plan.runs(query_rank):
        if window is not None:
            step = max(window, _WINDOW_ROWS)
            for low in range(start, stop, step):
                high, first = min(low + step, stop), max(document, low - window + 1)
                # One rectangle may hold keys before, inside and behind the window.
                found.append(rectangle(low, high, offset + low - start, first, high, "masked"))
        elif causal:
            found.append(rectangle(start, stop, offset, document, start, "full"))
            if key_rank == query_rank:
                found.append(rectangle(start, stop, offset, start, stop, "causal"))
        else:
            end = int(starts[np.searchsorted(starts, document, side="right")])
            found.append(rectangle(start, stop, offset, document, end, "full"))
    return tuple(t for t in found if t.key_stop > t.key_start)


def mask_of(
    plan: SequencePlan, rectangle: Rectangle, *, query_rank: int, key_rank: int, window: int
) -> Tensor:
    """`[queries, keys]`, bool: the keys that each query of a masked rectangle sees. Local."""
    queries = torch.from_numpy(_places(plan, query_rank)[rectangle.queries])
    keys = torch.from_numpy(_places(plan, key_rank)[rectangle.keys])
    distance = queries[:, None] - keys
    return (distance >= 0) & (distance < window)


@lru_cache(maxsize=256)
def _places(plan: SequencePlan, rank: int) -> np.ndarray:
    return plan.indices(rank).numpy()
