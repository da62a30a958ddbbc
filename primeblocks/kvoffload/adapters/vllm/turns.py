"""Turns of requests to bring pages into a pool that cannot hold the pages of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Turns"]


@dataclass
class _Turn:
    pages: set[Hashable] = field(default_factory=set)
    waiting_since_s: float | None = None


class Turns:
    """A first-come, first-served queue: requests do not evict each other's pages for ever.

    The first request may bring all of its pages. Those behind it may bring theirs while all fit
    together, and wait otherwise. A request that has waited longer than the patience, or needs more
    pages than the pool has, is told to go on without.

    Args:
        capacity: pages of the pool.
        patience_s: seconds that a request may wait in all; computing pages is seldom slower.
        clock: seconds.
    """

    def __init__(
        self, capacity: int, *, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._patience_s = patience_s
        self._clock = clock
        self._turns: dict[str, _Turn] = {}
        self._pages = 0  # of all requests together

    def is_first(self, request: str) -> bool:
        """Whether this request came before all others that have not left."""
        return next(iter(self._turns), None) == request

    def hold(self, request: str, page: Hashable) -> None:
        """Record that the pool has this page and the request will use it."""
        turn = self._turns.setdefault(request, _Turn())
        self._pages += page not in turn.pages
        turn.pages.add(page)

    def ask(self, request: str, page: Hashable) -> Literal["come", "wait", "go on"]:
        """Tell whether the request may bring this page into the pool now."""
        turn = self._turns.setdefault(request, _Turn())
        is_new = page not in turn.pages
        if len(turn.pages) + is_new > self._capacity:
            return "go on"
        if not self.is_first(request) and self._pages + is_new > self._capacity:
            return self.wait(request)
        self.hold(request, page)
        return "come"

    def wait(self, request: str) -> Literal["wait", "go on"]:
        """Tell whether the request may wait for room that transfers under way still take."""
        turn = self._turns.setdefault(request, _Turn())
        now = self._clock()
        if turn.waiting_since_s is None:
            turn.waiting_since_s = now
        return "wait" if now - turn.waiting_since_s < self._patience_s else "go on"

    def leave(self, request: str) -> None:
        """Remove a request that has its pages or no longer needs them."""
        turn = self._turns.pop(request, None)
        if turn is not None:
            self._pages -= len(turn.pages)
