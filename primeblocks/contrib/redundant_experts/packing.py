"""Assign copies of experts to ranks, so that ranks have equal loads. Pure. See `placement`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

__all__ = ["packed"]


def packed(tokens: Sequence[float], ranks: int, redundant: int, slack: float) -> tuple[int, ...]:
    """Return the expert at each place, ascending on each rank. Arguments as in `plan_placement`.

    Let p be the load of the hottest copy. The load of each rank is at most the larger of
    `mean + p (ranks - 1) / ranks` and `(1 + slack) mean`.
    """
    copies = _copies(tokens, ranks, redundant)
    piece = np.array(tokens) / copies
    packing = _Packing(_dealt(piece, copies, ranks), piece)
    packing.level()
    mean = math.fsum(tokens) / ranks
    packing.bring_home(max(packing.loads.max(), mean * (1 + slack)))
    held = np.sort(packing.experts.reshape(ranks, -1), axis=1)
    return tuple(held.flatten().tolist())


def _copies(tokens: Sequence[float], ranks: int, redundant: int) -> list[int]:
    """Count each expert's copies: one, and each redundant one for the copy with most to do."""
    copies = [1] * len(tokens)
    # Experts without tokens share the remaining copies evenly: fewest copies first.
    queue = [(-load, 1, expert) for expert, load in enumerate(tokens)]
    heapq.heapify(queue)
    for _ in range(redundant):
        _, count, expert = heapq.heappop(queue)
        copies[expert] = count = count + 1
        if count < ranks:
            heapq.heappush(queue, (-tokens[expert] / count, count, expert))
    return copies


def _dealt(piece: np.ndarray, copies: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the experts of each rank: largest first, in rounds of one per rank.

    Copies of one expert are neighbours in this order, so they cover two rounds at most. Copies in
    the later round come first in it, so a rank without that expert is always left.
    """
    order = sorted(range(len(copies)), key=lambda e: (-piece[e], e))
    pieces = [e for e in order for _ in range(copies[e])]
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for start in range(0, len(pieces), ranks):
        free = set(range(ranks))
        for expert in pieces[start : start + ranks]:
            rank = min((r for r in free if expert not in held[r]), key=lambda r: (load[r], r))
            free.remove(rank)
            held[rank].append(expert)
            load[rank] += piece[expert]
    return held


class _Packing:
    """Physical experts, flat by rank, and the loads of ranks during exchanges."""

    def __init__(self, held: list[list[int]], piece: np.ndarray) -> None:
        self.ranks, self.width = len(held), len(held[0])
        self.piece = piece
        self.experts = np.array(held).flatten()
        self.places = np.arange(self.experts.size)
        self.holds = np.zeros((self.ranks, piece.size), dtype=bool)
        self.holds[self.places // self.width, self.experts] = True
        self.loads = np.array([self._load(rank) for rank in range(self.ranks)])

    def level(self) -> None:
        """Exchange experts of the busiest rank, while both ranks end up below its load."""
        while True:
            busiest = int(self.loads.argmax())
            a, b = self.places.reshape(self.ranks, -1)[busiest][:, None], self.places[None]
            after = self._after(a, b)
            # By more than rounding, so that the loop ends.
            if after.min() >= self.loads[busiest] * (1 - 1e-9):
                return
            self._exchange(a, b, after)

    def bring_home(self, limit: float) -> None:
        """Exchange experts so that more are on their owner, and no load exceeds `limit`."""
        owner = np.arange(self.piece.size) // (self.piece.size // self.ranks)
        a = self.places[:, None]
        while True:
            home = owner[self.experts][:, None]
            b = home * self.width + np.arange(self.width)
            theirs = owner[self.experts[b]]
            gain = 1 + (theirs == a // self.width) - 1 * (theirs == home)
            after = np.where(gain > 0, self._after(a, b), math.inf)
            if after.min() > limit:
                return
            self._exchange(a, b, after)

    def _after(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the higher load of two ranks after an exchange of a and b, or inf if refused."""
        rank_a, rank_b, x, y = a // self.width, b // self.width, self.experts[a], self.experts[b]
        less = self.piece[x] - self.piece[y]
        higher = np.maximum(self.loads[rank_a] - less, self.loads[rank_b] + less)
        return np.where(self.holds[rank_b, x] | self.holds[rank_a, y], math.inf, higher)

    def _exchange(self, a: np.ndarray, b: np.ndarray, after: np.ndarray) -> None:
        where = np.unravel_index(after.argmin(), after.shape)
        pair = np.array([np.broadcast_to(s, after.shape)[where] for s in (a, b)])
        old, ranks = self.experts[pair], pair // self.width
        self.experts[pair] = old[::-1]
        self.holds[ranks, old], self.holds[ranks, old[::-1]] = False, True
        self.loads[ranks] = [self._load(rank) for rank in ranks.tolist()]

    def _load(self, rank: int) -> float:
        # Rounded exactly, because ranks on different processors must make the same plan.
        return math.fsum(self.piece[self.experts.reshape(self.ranks, -1)[rank]])
