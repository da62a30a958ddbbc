"""Partitions of weights into parts of equal sums, and into bins of a capacity."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["balanced_parts", "first_fit_decreasing", "lower_bound", "within_capacity"]

# Exchanges end if the largest sum is this close to the lower bound.
_CLOSE = 1e-4
_NEAR = 1e-2  # Annealing begins if it is not even this close.


def balanced_parts(
    weights: NDArray[np.float64], parts: int, *, annealing_steps: int = 0
) -> list[list[int]]:
    """Return ascending indices by part: largest differencing, then exchanges. Pure.

    Differencing repeatedly joins the two partial partitions with the largest spread, the largest
    part of one with the smallest of the other. Then items of the largest part are moved, or
    exchanged for smaller items, while that lowers the larger sum of the two parts. If the result is
    more than 1 % above the lower bound, annealing also tries exchanges that raise it for a while.
    Annealing takes some microseconds per step and is deterministic.

    Source: Karmarkar and Karp 1982 (largest differencing); Kirkpatrick et al. 1983 (annealing).
    """
    found = _differenced(weights, parts)
    least = lower_bound(weights, parts)
    top = _exchange(weights, found, enough=least * (1 + _CLOSE))
    if annealing_steps and top > least * (1 + _NEAR):
        other = _annealed(weights, found, least, annealing_steps)
        if _exchange(weights, other, enough=least * (1 + _CLOSE)) < top:
            found = other
    return [sorted(part) for part in found]


def lower_bound(weights: NDArray[np.float64], parts: int) -> float:
    """Return a lower bound on the sum of the largest part. Pure.

    It is the largest of three values: the mean, the largest weight, and the sum of the `k + 1`
    smallest of the `k * parts + 1` largest weights. Some part has `k + 1` of these weights.
    """
    ordered = np.sort(weights)[::-1]
    totals = np.concatenate([[0.0], np.cumsum(ordered)])
    bound = max(float(totals[-1]) / parts, float(ordered[0]) if len(ordered) else 0.0)
    for k in range(1, (len(ordered) - 1) // parts + 1):
        last = k * parts + 1
        bound = max(bound, float(totals[last] - totals[last - k - 1]))
    return bound


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return indices by bin: the largest first, each into the first bin with room. Pure.

    Source: Johnson 1973; Yue 1991 (at most 11/9 of the fewest bins, plus one).
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        place = next((at for at, left in enumerate(room) if left >= sizes[i]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(i)
        room[place] -= sizes[i]
    return bins


def within_capacity(
    weights: NDArray[np.float64], sizes: NDArray[np.int64], parts: int, capacity: int
) -> list[list[int]]:
    """Return parts of about equal weight, each of at most `capacity`. Pure.

    If parts that are balanced without regard to sizes fit, these are returned. Otherwise items are
    assigned, largest first, to the lightest part with room. If that fails, first fit fills the
    parts, and the heaviest are split.

    Args:
        parts: at least as many as `first_fit_decreasing` needs.
    """
    if not parts:
        return []
    found = balanced_parts(weights, parts)
    if all(sizes[part].sum() <= capacity for part in found):
        return found
    dealt: list[list[int]] = [[] for _ in range(parts)]
    load, room = np.zeros(parts), np.full(parts, capacity)
    for i in np.argsort(-sizes, kind="stable").tolist():
        fits = np.flatnonzero(room >= sizes[i])
        if not len(fits):
            break
        place = fits[np.argmin(load[fits])]
        dealt[place].append(i)
        load[place] += weights[i]
        room[place] -= sizes[i]
    else:
        return [sorted(part) for part in dealt]
    bins = first_fit_decreasing(sizes.tolist(), capacity)
    while len(bins) < parts and any(len(part) > 1 for part in bins):
        heaviest = max(
            (at for at, part in enumerate(bins) if len(part) > 1),
            key=lambda at: (weights[bins[at]].sum(), -at),
        )
        whole = bins.pop(heaviest)
        bins += [[whole[i] for i in half] for half in balanced_parts(weights[whole], 2)]
    return [sorted(part) for part in bins] + [[] for _ in range(parts - len(bins))]


def _differenced(weights: NDArray[np.float64], parts: int) -> list[list[int]]:
    # Per partial partition: the negative spread, a number against ties, descending sums, items.
    # Empty parts are left out, because most partial partitions have few items.
    heap: list[tuple[float, int, NDArray[np.float64], list[list[int]]]] = []
    for i in np.argsort(-weights, kind="stable").tolist():
        spread = float(weights[i]) if parts > 1 else 0.0
        heap.append((-spread, len(heap), weights[[i]], [[i]]))
    if not heap:
        return [[] for _ in range(parts)]
    heapq.heapify(heap)
    tie = len(heap)
    while len(heap) > 1:
        _, _, sums, items = heapq.heappop(heap)
        _, _, others, more = heapq.heappop(heap)
        alone = min(len(sums), parts - len(others))  # The largest get nothing.
        shared, ascending = len(sums) - alone, others[::-1].copy()
        ascending[:shared] += sums[alone:]
        joined = np.concatenate([sums[:alone], ascending])
        less = more[::-1]
        both = [a + b for a, b in zip(items[alone:], less, strict=False)]
        merged = [*items[:alone], *both, *less[shared:]]
        order = np.argsort(-joined, kind="stable")
        joined = joined[order]
        least = float(joined[-1]) if len(joined) == parts else 0.0
        heapq.heappush(heap, (least - float(joined[0]), tie, joined, [merged[at] for at in order]))
        tie += 1
    found = heap[0][3]
    return found + [[] for _ in range(parts - len(found))]


def _annealed(
    weights: NDArray[np.float64], parts: list[list[int]], least: float, steps: int
) -> list[list[int]]:
    """Exchange items at random to reduce the squared excess over `least`. Early steps may raise it.

    The smallest items, which together fill no relevant gap, stay where they are.
    """
    small = np.cumsum(np.sort(weights)) <= least * _NEAR * len(parts) / 2
    items = np.argsort(weights, kind="stable")[np.count_nonzero(small) :].tolist()
    owner = np.empty(len(weights), dtype=np.int64)
    for at, part in enumerate(parts):
        owner[part] = at
    sums = (np.bincount(owner, weights, len(parts)) / least).tolist()
    w, own = (weights / least).tolist(), owner.tolist()
    draw = random.Random(0)
    for step in range(steps):
        i, j = draw.choice(items), draw.choice(items)
        # One step in three is a move of i to the part of j.
        swaps = draw.random() > 1 / 3
        a, b = own[i], own[j]
        if a == b:
            continue
        change = w[i] - w[j] if swaps else w[i]
        one, other = sums[a] - change, sums[b] + change
        worse = _excess(one) + _excess(other) - _excess(sums[a]) - _excess(sums[b])
        heat = 3e-3 * (1 - step / steps)
        if worse <= 0 or draw.random() < math.exp(-worse / heat):
            own[i], sums[a], sums[b] = b, one, other
            if swaps:
                own[j] = a
    found: list[list[int]] = [[] for _ in parts]
    for i, at in enumerate(own):
        found[at].append(i)
    return found


def _excess(total: float) -> float:
    return max(total - 1.0, 0.0) ** 2


def _exchange(weights: NDArray[np.float64], parts: list[list[int]], *, enough: float) -> float:
    """Move or exchange items of the largest part in place while its sum falls. Return the sum."""
    owner = np.empty(len(weights) + len(parts), dtype=np.int64)
    for at, part in enumerate(parts):
        owner[part] = at
    # Each part gets one more item, of weight 0. An exchange with such an item is a move.
    owner[len(weights) :] = np.arange(len(parts))
    every = np.concatenate([weights, np.zeros(len(parts))])
    sums = np.bincount(owner, every, len(parts))
    while len(parts) > 1 and sums.max() > enough:
        top = int(sums.argmax())
        own, others = np.flatnonzero(owner == top), np.flatnonzero(owner != top)
        change = every[own][:, None] - every[others][None]
        larger = np.maximum(sums[top] - change, sums[owner[others]][None] + change)
        at = int(larger.argmin())
        i, j = own[at // len(others)], others[at % len(others)]
        # The sum must fall by more than rounding, or the loop would not end.
        if larger.flat[at] >= sums[top] * (1 - 1e-12):
            break
        owner[[i, j]] = owner[[j, i]]
        sums = np.bincount(owner, every, len(parts))
    for at, part in enumerate(parts):
        part[:] = np.flatnonzero(owner[: len(weights)] == at).tolist()
    return float(sums.max(initial=0.0))
