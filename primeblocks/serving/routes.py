"""Routes: pure functions that choose the engine of a request from facts about both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from numbers import Real

import xxhash

from ..errors import UsageError, shown

__all__ = [
    "AddedSeconds",
    "EngineState",
    "PrefixAndLoad",
    "Request",
    "Route",
    "consistent_hash",
    "least_loaded",
    "round_robin",
]


@dataclass(frozen=True, slots=True)
class Request:
    """The facts of a request before it has an engine.

    Args:
        session: the conversation to which it belongs, as text.
        pages: names of the whole pages of its prompt, first page first. Each name includes the
            salt of the cache, so that pages of two policy versions differ. `kvoffload.page_hashes`
            makes them.
        ordinal: the number of earlier requests of the fleet.
    """

    session: str = ""
    pages: tuple[Hashable, ...] = ()
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of one engine that may get a request.

    Args:
        name: its name in the fleet.
        in_flight: the requests that it has.
        max_in_flight: the requests that it can have before they wait for each other or its cache.
        matched: the leading pages of the request that it is assumed to hold.

    Raises:
        UsageError: a number is negative or NaN, or `max_in_flight` is 0.
    """

    name: str
    in_flight: int
    max_in_flight: int
    matched: int = 0

    def __post_init__(self) -> None:
        # Written so that NaN is refused too, and cheaply, because it runs per engine and request.
        if not (self.in_flight >= 0 and self.max_in_flight > 0 and self.matched >= 0):
            raise UsageError(
                f"engine {self.name!r} needs in_flight >= 0, max_in_flight > 0 and matched >= 0; "
                f"got {shown(self.in_flight)}, {shown(self.max_in_flight)}, {shown(self.matched)}"
            )

    @property
    def load(self) -> float:
        """Requests in flight, divided by `max_in_flight`."""
        return self.in_flight / self.max_in_flight


Route = Callable[[Request, Sequence[EngineState]], int]
"""A function that returns a position in a sequence of engines, which is not empty."""


def _some(engines: Sequence[EngineState]) -> Sequence[EngineState]:
    if not engines:
        raise UsageError("a route chooses among engines that are open; got none.")
    return engines


def round_robin(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose the engines in turn. Pure."""
    return request.ordinal % len(_some(engines))


def least_loaded(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose the engine with the least load, or the first of several. Pure."""
    return min(range(len(_some(engines))), key=lambda place: engines[place].load)


def consistent_hash(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose the same engine for a session each time, whatever its load. Pure.

    If an engine leaves or joins, only its own sessions move. Use this route for comparisons: a
    session stays with a saturated engine while other engines are idle.

    Source: highest random weight, Thaler and Ravishankar 1998.
    """

    def weight(place: int) -> int:
        both = f"{engines[place].name}\0{request.session}"
        # JSON may contain half a surrogate, which is a name like any other.
        return xxhash.xxh3_64_intdigest(both.encode(errors="surrogatepass"))

    return max(range(len(_some(engines))), key=weight)


@dataclass(frozen=True)
class PrefixAndLoad:
    """Choose by the part of the prompt that an engine holds, less `beta` times its relative load.

    The relative load is the engine's requests in flight, divided by the mean of all engines. A
    saturated engine gets nothing while another engine has room. A session that moves computes its
    prompt again on the new engine.

    Args:
        beta: the part of a prompt that is worth as much as one mean number of requests. 0 looks at
            the prefix only. With a larger value, sessions move sooner.
        saturated: the load from which an engine has no room.

    Raises:
        UsageError: a number is negative or infinite, or `saturated` is 0.

    Source: the score is that of vLLM's production-stack, #1035.
    """

    beta: float = 0.4
    saturated: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(self.saturated, beta=self.beta)

    def __call__(self, request: Request, engines: Sequence[EngineState]) -> int:
        # At least 1: with few requests, one more or less means little.
        mean = max(1.0, sum(engine.in_flight for engine in engines) / len(_some(engines)))

        def score(place: int) -> tuple[bool, float, float]:
            engine = engines[place]
            held = engine.matched / max(1, len(request.pages))
            has_room = engine.load < self.saturated
            return has_room, held - self.beta * engine.in_flight / mean, -engine.load

        return max(range(len(engines)), key=score)


@dataclass(frozen=True)
class AddedSeconds:
    """Choose the engine where a request costs all agents together the fewest seconds.

    Computing a prompt stops all requests that decode on the engine, so each page to compute counts
    for all of them. Decoding an answer slows them. With many requests on every engine a session
    stays where its pages are. It moves when other engines empty. A saturated engine gets nothing
    while another engine has room.

    Args:
        token_s: returns the seconds between two tokens of a request, given the number of running
            requests: `EngineModel.token_s` of the plan, or a table of measurements.
        page_s: the seconds that an engine needs to compute one page of a prompt.
        tokens: the tokens decoded where the session goes now: one answer times the turns that the
            session may stay.
        saturated: the load from which an engine has no room.

    Raises:
        UsageError: a number is negative or infinite, or `saturated` is 0. A choice raises it if
            `token_s` returns NaN.
    """

    token_s: Callable[[int], float]
    page_s: float
    tokens: float
    saturated: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(self.saturated, page_s=self.page_s, tokens=self.tokens)

    def __call__(self, request: Request, engines: Sequence[EngineState]) -> int:
        def added(place: int) -> tuple[bool, float]:
            engine = engines[place]
            others = engine.in_flight
            prompt_s = self.page_s * (len(request.pages) - engine.matched)
            slower_s = others * (self.token_s(others + 1) - self.token_s(others)) if others else 0.0
            token_s = self.token_s(others + 1) + slower_s
            seconds = prompt_s * (others + 1) + self.tokens * token_s
            if isnan(seconds):  # NaN compares as neither smaller nor larger.
                raise UsageError(f"token_s says no number for {others + 1} requests.")
            return engine.load >= self.saturated, seconds

        return min(range(len(_some(engines))), key=added)


def _check_numbers(saturated: float, **numbers: float) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Real) or not 0 <= number < inf:
            raise UsageError(f"needs {name} >= 0, and finite; got {shown(number)}.")
    if not isinstance(saturated, Real) or not saturated > 0:
        raise UsageError(f"needs saturated > 0; got {shown(saturated)}.")
