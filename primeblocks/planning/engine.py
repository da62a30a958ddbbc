"""An inference engine made of a throughput curve. Requests share it, and weights may change.

A request waits until fewer than `max_running` requests run, then runs at the pace of all running
requests, and ends when its tokens are made. `pause` stops all requests and `resume` continues them.
`swap` gives the tokens made afterwards to another policy. One timer is set, for the next end.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from ..errors import UsageError

__all__ = ["EngineModel", "SimulatedEngine", "decode_latency"]


def decode_latency(*, step_s: float, request_s: float = 0.0) -> Callable[[int], float]:
    """Return a throughput function for decode steps of `step_s + running * request_s` seconds.

    `step_s` is the time in seconds to read the weights. `request_s` is the time per request to read
    the cache and to compute. Pure.

    Raises:
        UsageError: `step_s` is not above 0, or `request_s` is negative.
    """
    if step_s <= 0 or request_s < 0:
        raise UsageError(
            f"step_s must be above 0, and request_s not negative; got {step_s}, {request_s}."
        )
    return lambda running: running / (step_s + running * request_s)


@dataclass(frozen=True)
class EngineModel:
    """The measured throughput of one engine.

    Args:
        tokens_per_s: a function from the number of running requests to their total throughput in
            tokens per second.
        max_running: the maximum number of running requests. Further requests wait in a queue.

    Raises:
        UsageError: `tokens_per_s` cannot be called, or `max_running` is below 1.
    """

    tokens_per_s: Callable[[int], float]
    max_running: int = 1 << 30

    def __post_init__(self) -> None:
        if not callable(self.tokens_per_s) or self.max_running < 1:
            raise UsageError(
                "tokens_per_s must be a function, such as decode_latency(...) or one that "
                f"interpolates measurements, and max_running at least 1; got {self!r:.80}."
            )

    def token_s(self, running: int) -> float:
        """Return the seconds between two tokens of a request while `running` requests run. Pure."""
        return running / self.tokens_per_s(running)


@dataclass(eq=False)
class _Request:
    tokens: float
    done: asyncio.Future[float]
    begun: float = -1.0  # tokens that the engine had made for a request running all along
    live: bool = True


class SimulatedEngine:
    """Runs requests in the time of the running event loop, all at the same pace.

    Args:
        model: the throughput.
        version: the version of the first policy.
    """

    def __init__(self, model: EngineModel, *, version: int = 0) -> None:
        self.model = model
        self._busy_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._each = 0.0  # tokens made for a request that has been running from the start
        self._since = self._loop.time()
        self._running: list[tuple[float, int, _Request]] = []  # by the value of _each at the end
        self._running_count = 0
        self._waiting: deque[_Request] = deque()
        self._order = count()
        self._paused = self._planned = False
        self._timer: asyncio.TimerHandle | None = None
        self._versions, self._starts = [version], [0.0]  # a policy, and _each when it came

    @property
    def busy_s(self) -> float:
        """Seconds until now in which at least one request was running."""
        self._advance()
        return self._busy_s

    async def generate(self, tokens: float) -> list[tuple[int, float]]:
        """Return, after `tokens` are made, how many of them each policy made."""
        request = _Request(float(tokens), self._loop.create_future())
        self._waiting.append(request)
        self._plan_soon()
        try:
            begun = await request.done
        except asyncio.CancelledError:
            self._forget(request)
            raise
        return self._spans(begun, begun + tokens)

    def swap(self, version: int) -> None:
        """Make all further tokens with the policy `version`."""
        self._advance()
        self._versions.append(version)
        self._starts.append(self._each)

    def pause(self) -> None:
        """Stop all requests, and keep them."""
        self._advance()
        self._paused = True
        self._plan_soon()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._advance()
        self._paused = False
        self._plan_soon()

    def _advance(self) -> None:
        now = self._loop.time()
        if self._running_count and not self._paused:
            passed = now - self._since
            self._each += passed / self.model.token_s(self._running_count)
            self._busy_s += passed
        self._since = now

    def _plan_soon(self) -> None:
        # Many requests come and go at the same instant, so plan once after all of them.
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._plan)

    def _plan(self) -> None:
        """End finished requests, start waiting ones, and set the timer for the next end."""
        self._planned = False
        self._advance()
        running = self._running
        while running and (not running[0][2].live or self._is_done(running[0][0])):
            _, _, request = heapq.heappop(running)
            if request.live:
                self._running_count -= 1
                request.live = False
                if not request.done.done():
                    request.done.set_result(request.begun)
        while self._waiting and self._running_count < self.model.max_running:
            request = self._waiting.popleft()
            request.begun = self._each
            heapq.heappush(running, (self._each + request.tokens, next(self._order), request))
            self._running_count += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if running and not self._paused:
            left = running[0][0] - self._each
            wait_s = left * self.model.token_s(self._running_count)
            self._timer = self._loop.call_later(max(0.0, wait_s), self._plan)

    def _is_done(self, end: float) -> bool:
        # A sum of many steps reaches its end only up to rounding.
        return end - self._each <= 1e-9 * max(1.0, end)

    def _forget(self, request: _Request) -> None:
        if request.begun < 0:
            self._waiting.remove(request)
        elif request.live:
            self._advance()
            request.live = False
            self._running_count -= 1
            self._plan_soon()

    def _spans(self, begin: float, end: float) -> list[tuple[int, float]]:
        first = bisect_right(self._starts, begin) - 1
        spans = []
        for place in range(first, len(self._starts)):
            until = self._starts[place + 1] if place + 1 < len(self._starts) else end
            size = min(until, end) - max(self._starts[place], begin)
            if size > 0 or place == first:
                spans.append((self._versions[place], size))
            if until >= end:
                break
        return spans
