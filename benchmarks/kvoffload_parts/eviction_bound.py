"""What the best policy that does not know the future could have had, at most.

A policy sees that a rollout writes, and later which tool it waits for. It knows how long answers
and tools take in general, not how long this one will. Let a tier be as large as it likes at each
moment, and as large as it is on average only, and let a place cost `price` uses a tick. Then each
turn stands alone: its pages are kept up to the best moment to give up, first while the answer is
written, then while the tool runs. What all turns are worth at that price, plus the price of all
places, is at least what any policy has; the lowest such sum over all prices is the bound (Lagrange
duality, as in Whittle, Restless bandits, 1988). Of pages of several rollouts the policy may even
know the next use, and rollouts that do not return cost nothing. Times are those of the trace.

It holds where pauses are drawn one by one. Who queues waits for those in front, which a policy can
see: there, Belady's rule is the only bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict.traces import End, Trace, Use, Wait

__all__ = ["bound"]

PRICES = np.geomspace(1e-7, 1e-2, 120)


def bound(trace: Trace, *, capacity_pages: int) -> float:
    """A hit rate that no policy without foresight exceeds; at most 1. Pure."""
    seen = _turns(trace)
    turns = np.array([turn.pages for turn in seen.turns], float)
    answers = np.array([turn.answer for turn in seen.turns], float)
    tools = np.array([turn.tool for turn in seen.turns], float)
    kinds = np.unique([str(turn.what) for turn in seen.turns], return_inverse=True)[1]
    shared = np.array(seen.shared, float)
    lowest = float(seen.asked)
    for price in PRICES:
        after = np.empty(len(turns))
        for kind in range(kinds.max() + 1):
            here = kinds == kind
            after[here] = _kept(tools[here], turns[here], np.ones(here.sum()), price)
        kept = _kept(answers, turns, after, price) * turns.sum()
        free = np.maximum(0.0, 1 - price * shared).sum()
        lowest = min(lowest, free + kept + price * capacity_pages * seen.ticks)
    return lowest / seen.asked


def _kept(ticks: np.ndarray, pages: np.ndarray, worth: np.ndarray, price: float) -> float:
    """What a page brings that is kept up to the best moment to give up; the same for all turns."""
    order = np.argsort(ticks)
    ticks, pages, worth = ticks[order], pages[order], worth[order]
    held = np.cumsum(pages * ticks) + (pages.sum() - np.cumsum(pages)) * ticks
    return max(0.0, float((np.cumsum(pages * worth) - price * held).max())) / pages.sum()


@dataclass
class _Turn:
    began: int
    answer: int = 0
    what: Hashable = None
    tool: int = 0
    pages: int = 0


@dataclass
class _Seen:
    turns: list[_Turn]
    shared: list[int]
    asked: int
    ticks: int


def _turns(trace: Trace) -> _Seen:
    users: defaultdict[PageKey, set[Hashable]] = defaultdict(set)
    for event in trace.events:
        if isinstance(event, Use):
            for key in event.pages:
                users[key].add(event.rollout)
    current: dict[Hashable, _Turn] = {}
    last: dict[PageKey, int] = {}
    seen = _Seen([], [], 0, 0)
    for event in trace.events:
        if isinstance(event, Wait):
            turn = current[event.rollout]
            turn.answer, turn.what = seen.ticks - turn.began, event.what
        elif isinstance(event, End):
            current.pop(event.rollout, None)
        elif isinstance(event, Use):
            _use(event, seen, current, last, users)
    return seen


def _use(
    event: Use,
    seen: _Seen,
    current: dict[Hashable, _Turn],
    last: dict[PageKey, int],
    users: dict[PageKey, set[Hashable]],
) -> None:
    common = [key for key in event.pages if len(users[key]) > 1]
    asked = set(event.pages[: event.asked])
    seen.shared += [seen.ticks - last[key] for key in common if key in asked]
    turn = current.get(event.rollout)
    if turn is not None and turn.what is not None:
        turn.tool = seen.ticks - turn.began - turn.answer
        turn.pages = event.asked - sum(key in asked for key in common)
        if turn.pages:
            seen.turns.append(turn)
        turn = None
    seen.asked += event.asked
    seen.ticks += len(event.pages)
    last.update(dict.fromkeys(common, seen.ticks))
    if turn is None:
        current[event.rollout] = _Turn(seen.ticks)
