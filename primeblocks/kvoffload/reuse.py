"""How long pages wait until they are used again."""

from __future__ import annotations

from collections import OrderedDict
from itertools import accumulate

from .page import PageKey

__all__ = ["Gaps", "patience"]

_BUCKETS = 128
# Fewer gaps than this say nothing; more than that are halved, so that old ones fade.
_FEW, _MANY, _EVERY = 64, 1 << 16, 1024


class Gaps:
    """Waiting times of pages between two uses, in ticks, of pages that left in between too.

    Cost: O(1) a use, and about 2000 steps every 1024 uses. The last use of `memory_pages` pages
    that left is remembered.
    """

    def __init__(self, *, memory_pages: int) -> None:
        self._memory = memory_pages
        self._left: OrderedDict[PageKey, int] = OrderedDict()
        self._counts = [0] * _BUCKETS
        self._total = 0
        self._new = 0
        self._patience = 0.0

    def leave(self, key: PageKey, last_used: int) -> None:
        """A page that may come back has left."""
        self._left[key] = last_used
        if len(self._left) > self._memory:
            self._left.popitem(last=False)

    def back(self, key: PageKey) -> int | None:
        """When a page that had left was last used; it is forgotten."""
        return self._left.pop(key, None)

    def add(self, ticks: int) -> None:
        """A page was used again after `ticks`."""
        self._counts[_bucket(ticks)] += 1
        self._total += 1
        self._new += 1
        if self._total > _MANY:
            self._counts = [count >> 1 for count in self._counts]
            self._total = sum(self._counts)

    def patience(self) -> float:
        """`patience` of the gaps so far; 0, least recently used, while there are few."""
        if self._new >= _EVERY or (self._patience == 0.0 and self._new >= _FEW):
            self._new = 0
            self._patience = patience(self._counts)
        return self._patience


def patience(counts: list[int]) -> float:
    """The wait after which a page is worth less than one just used.

    What a place in a tier is worth is the chance of a hit per tick that it is held, with the best
    moment to give up: `max over t of P(wait < t) / E[min(wait, t)]`, the Gittins index. Pages that
    come back after a fixed time are worth more the longer they have waited; where most
    waits are short and some very long, less. Pure.

    Args:
        counts: waits by bucket; bucket `2 b + h` starts at `(2 + h) 2 ** (b - 2)` ticks.

    Source: Gittins, Bandit processes and dynamic allocation indices, 1979; hit density as a rule
    of eviction: Beckmann, Chen and Cidon, LHD, NSDI 2018.
    """
    used = [index for index, count in enumerate(counts) if count]
    if not used:
        return 0.0
    ends = [_start(index + 1) for index in used]
    back = list(accumulate(counts[index] for index in used))
    held: list[float] = []
    cost, before, waiting = 0.0, 0.0, back[-1]
    for index, end, returned in zip(used, ends, back, strict=True):
        after = back[-1] - returned
        # Within a bucket, waits are spread evenly.
        cost += (_start(index) - before) * waiting + (end - _start(index)) * (waiting + after) / 2
        held.append(cost)
        before, waiting = end, after
    fresh = max(hits / cost for hits, cost in zip(back, held, strict=True))
    answer = ends[-1]
    for age in range(len(used) - 2, -1, -1):
        later = range(age + 1, len(used))
        if max((back[t] - back[age]) / (held[t] - held[age]) for t in later) >= fresh:
            break
        answer = ends[age]
    return answer


def _bucket(ticks: int) -> int:
    bits = max(ticks, 1).bit_length()
    return min(2 * bits + (((ticks << 1) >> (bits - 1)) & 1), _BUCKETS - 1)


def _start(bucket: int) -> float:
    bits, half = divmod(bucket, 2)
    return (2 + half) * 2.0 ** (bits - 2)
