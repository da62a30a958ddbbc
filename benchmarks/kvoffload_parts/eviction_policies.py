"""Policies to compare with: LRU, SIEVE, S3-FIFO, LFU-DA, ARC, and Belady's.

Each is a tier of equal pages that knows keys alone. The last page of a request is used first, which
favours them: what is in front of a prefix stays longer.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Sequence

from primeblocks.kvoffload import PageKey

from .eviction_engine import Ask, Behind, Step

__all__ = ["Arc", "Belady", "LfuDa", "Lru", "S3Fifo", "Sieve"]

_Keys = OrderedDict[PageKey, None]


class _Tier:
    """What the tiers share: they look at no step but saves and loads."""

    def __init__(self, capacity_pages: int) -> None:
        self.capacity = capacity_pages

    def note(self, step: Step) -> None:
        """Look at no other steps."""

    def load(self, rollout: Hashable, pages: Sequence[PageKey]) -> None:
        for key in reversed(pages):
            self.hit(key)

    def hit(self, key: PageKey) -> None:
        raise NotImplementedError


class Lru(_Tier):
    """The least recently used page leaves."""

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.keys: _Keys = OrderedDict()

    def __contains__(self, key: PageKey) -> bool:
        return key in self.keys

    def hit(self, key: PageKey) -> None:
        self.keys.move_to_end(key)

    def save(self, rollout: Hashable, key: PageKey) -> None:
        if len(self.keys) >= self.capacity:
            self.keys.popitem(last=False)
        self.keys[key] = None


class Sieve(_Tier):
    """A hand walks from the oldest page to the newest and takes the first not used since.

    Source: Zhang et al., SIEVE is simpler than LRU, NSDI 2024.
    """

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.used: OrderedDict[PageKey, bool] = OrderedDict()  # oldest first
        self.passed: OrderedDict[PageKey, bool] = OrderedDict()  # older than the hand

    def __contains__(self, key: PageKey) -> bool:
        return key in self.used or key in self.passed

    def hit(self, key: PageKey) -> None:
        (self.used if key in self.used else self.passed)[key] = True

    def save(self, rollout: Hashable, key: PageKey) -> None:
        if len(self.used) + len(self.passed) >= self.capacity:
            self._evict()
        self.used[key] = False

    def _evict(self) -> None:
        while True:
            if not self.used:
                self.used, self.passed = self.passed, self.used
            key, was_used = self.used.popitem(last=False)
            if not was_used:
                return
            self.passed[key] = False


class S3Fifo(_Tier):
    """A small queue for new pages, a main one for those used twice, and keys of those that left.

    Source: Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023; sizes as there.
    """

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.small: deque[PageKey] = deque()
        self.main: deque[PageKey] = deque()
        self.left: _Keys = OrderedDict()
        self.uses: dict[PageKey, int] = {}

    def __contains__(self, key: PageKey) -> bool:
        return key in self.uses

    def hit(self, key: PageKey) -> None:
        self.uses[key] = min(self.uses[key] + 1, 3)

    def save(self, rollout: Hashable, key: PageKey) -> None:
        while len(self.uses) >= self.capacity:
            self._evict()
        queue = self.small
        if key in self.left:
            del self.left[key]
            queue = self.main
        queue.append(key)
        self.uses[key] = 0

    def _evict(self) -> None:
        if self.small and len(self.small) >= max(1, self.capacity // 10):
            key = self.small.popleft()
            if self.uses[key] > 1:
                self.main.append(key)
                return
            del self.uses[key]
            self.left[key] = None
            if len(self.left) > self.capacity * 9 // 10:
                self.left.popitem(last=False)
        elif self.main:
            key = self.main.popleft()
            if self.uses[key]:
                self.uses[key] -= 1
                self.main.append(key)
            else:
                del self.uses[key]
        else:
            del self.uses[self.small.popleft()]


class LfuDa(_Tier):
    """The page with the fewest uses leaves; its count is added to that of all pages that come.

    Source: Arlitt et al., Evaluating content management techniques for web proxy caches, 1999.
    """

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.worth: dict[PageKey, tuple[int, int]] = {}  # uses and age, then order
        self.heap: list[tuple[int, int, PageKey]] = []
        self.age = self.pushed = 0

    def __contains__(self, key: PageKey) -> bool:
        return key in self.worth

    def hit(self, key: PageKey) -> None:
        self._put(key, self.worth[key][0] + 1)

    def save(self, rollout: Hashable, key: PageKey) -> None:
        while len(self.worth) >= self.capacity:
            worth, pushed, victim = heapq.heappop(self.heap)
            if self.worth.get(victim) == (worth, pushed):
                del self.worth[victim]
                self.age = worth
        self._put(key, self.age + 1)

    def _put(self, key: PageKey, worth: int) -> None:
        self.pushed += 1
        self.worth[key] = worth, self.pushed
        heapq.heappush(self.heap, (worth, self.pushed, key))


class Arc(_Tier):
    """Pages used once against pages used often, balanced by which of those that left come back.

    Source: Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003.
    """

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.target = 0.0
        self.once: _Keys = OrderedDict()
        self.often: _Keys = OrderedDict()
        self.once_left: _Keys = OrderedDict()
        self.often_left: _Keys = OrderedDict()

    def __contains__(self, key: PageKey) -> bool:
        return key in self.once or key in self.often

    def hit(self, key: PageKey) -> None:
        self.once.pop(key, None)
        self.often[key] = None
        self.often.move_to_end(key)

    def save(self, rollout: Hashable, key: PageKey) -> None:
        once, often = len(self.once_left), len(self.often_left)
        if key in self.once_left:
            self.target = min(self.target + max(1.0, often / once), self.capacity)
            self._replace(from_often=False)
            del self.once_left[key]
            self.often[key] = None
        elif key in self.often_left:
            self.target = max(self.target - max(1.0, once / often), 0.0)
            self._replace(from_often=True)
            del self.often_left[key]
            self.often[key] = None
        else:
            self._make_room(once, often)
            self.once[key] = None

    def _make_room(self, once: int, often: int) -> None:
        total = len(self.once) + len(self.often) + once + often
        if len(self.once) + once == self.capacity:
            if once:
                self.once_left.popitem(last=False)
                self._replace(from_often=False)
            else:
                self.once.popitem(last=False)
        elif total >= self.capacity:
            if total == 2 * self.capacity:
                self.often_left.popitem(last=False)
            self._replace(from_often=False)

    def _replace(self, *, from_often: bool) -> None:
        if len(self.once) + len(self.often) < self.capacity:
            return
        exactly = from_often and len(self.once) == self.target
        if self.once and (len(self.once) > self.target or exactly):
            self.once_left[self.once.popitem(last=False)[0]] = None
        else:
            self.often_left[self.often.popitem(last=False)[0]] = None


class Belady(_Tier):
    """The page that is asked for last leaves, with knowledge of the future; an oracle.

    No policy has more hits in requests of one page. Of longer ones it counts pages, not prefixes.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """

    def __init__(self, capacity_pages: int, seen: Behind) -> None:
        super().__init__(capacity_pages)
        self.asks: defaultdict[PageKey, deque[tuple[int, int]]] = defaultdict(deque)
        for at, step in enumerate(seen.steps):
            if isinstance(step, Ask):
                for place, key in enumerate(step.pages):
                    self.asks[key].append((at, place))
        self.next: dict[PageKey, tuple[float, int]] = {}
        self.heap: list[tuple[float, int, int, PageKey]] = []
        self.at = self.pushed = 0

    def __contains__(self, key: PageKey) -> bool:
        return key in self.next

    def hit(self, key: PageKey) -> None:
        self._put(key, after=self.at)

    def save(self, rollout: Hashable, key: PageKey) -> None:
        while len(self.next) >= self.capacity:
            at, place, _, victim = heapq.heappop(self.heap)
            if self.next.get(victim) == (-at, -place):
                del self.next[victim]
        self._put(key, after=self.at)

    def note(self, step: Step) -> None:
        if isinstance(step, Ask):
            for key in step.pages:  # those that were there and did not count
                if key in self.next:
                    self._put(key, after=self.at)
        self.at += 1

    def _put(self, key: PageKey, *, after: int) -> None:
        asks = self.asks[key]
        while asks and asks[0][0] <= after:
            asks.popleft()
        self.next[key] = at, place = asks[0] if asks else (float("inf"), 0)
        self.pushed += 1
        heapq.heappush(self.heap, (-at, -place, self.pushed, key))
