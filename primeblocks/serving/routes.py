"""Routes: pure choices of the engine that gets a request, from facts about both."""

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
    """Facts of a request that no engine has yet.

    Args:
        session: the conversation that it belongs to, as text.
        pages: names of the whole pages of its prompt, first page first, the cache's salt in each:
            a page of another policy version is another page. `kvoffload.page_hashes` names them.
        ordinal: requests of the fleet before it.
    """

    session: str = ""
    pages: tuple[Hashable, ...] = ()
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine that may get a request, at this moment.

    Args:
        name: its name in the fleet.
        in_flight: requests that it has.
        max_in_flight: requests beyond which they wait for each other, or for its cache.
        matched: lead pages of the request that it is believed to hold.

    Raises:
        UsageError: a number is negative or no number, or it takes no request.
    """

    name: str
    in_flight: int
    max_in_flight: int
    matched: int = 0

    def __post_init__(self) -> None:
        # Plainly, for each engine and request: what is no number compares with none.
        if not (self.in_flight >= 0 and self.max_in_flight > 0 and self.matched >= 0):
            raise UsageError(
                f"engine {self.name!r} needs in_flight >= 0, max_in_flight > 0 and matched >= 0; "
                f"got {shown(self.in_flight)}, {shown(self.max_in_flight)}, {shown(self.matched)}"
            )

    @property
    def load(self) -> float:
        """Requests in flight over what it takes."""
        return self.in_flight / self.max_in_flight


Route = Callable[[Request, Sequence[EngineState]], int]
"""A choice: a place in the sequence, which is not empty."""


def _some(engines: Sequence[EngineState]) -> Sequence[EngineState]:
    if not engines:
        raise UsageError("a route chooses among engines that are open; got none.")
    return engines


def round_robin(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose one engine after the other."""
    return request.ordinal % len(_some(engines))


def least_loaded(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose the engine with the least load, the first of several."""
    return min(range(len(_some(engines))), key=lambda place: engines[place].load)


def consistent_hash(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose the same engine for a session each time, whatever its load.

    Where an engine leaves or joins, the sessions move that it had or gets, and no others. It is
    here to be compared with: a session stays with an engine that is saturated while others idle.

    Source: highest random weight, Thaler and Ravishankar 1998.
    """

    def weight(place: int) -> int:
        both = f"{engines[place].name}\0{request.session}"
        # Half a surrogate, as JSON may bring, is a name like any other.
        return xxhash.xxh3_64_intdigest(both.encode(errors="surrogatepass"))

    return max(range(len(_some(engines))), key=weight)


@dataclass(frozen=True)
class PrefixAndLoad:
    """Choose by the part of the prompt that an engine holds, less `beta` times its relative load.

    That is its requests in flight over the mean of all engines. A saturated engine gets nothing
    while another has room: a session moves, and computes its prompt once more there.

    Args:
        beta: the part of a prompt that as many requests as the mean are worth. 0 is prefix alone;
            the more, the sooner a session moves.
        saturated: load from which an engine has no room.

    Raises:
        UsageError: a number is negative or infinite, or `saturated` is 0.

    Source: the score is that of vLLM's production-stack, #1035.
    """

    beta: float = 0.4
    saturated: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(self.saturated, beta=self.beta)

    def __call__(self, request: Request, engines: Sequence[EngineState]) -> int:
        # With few requests one more or less says nothing.
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

    A prompt stops whoever decodes there, so each page that must be computed counts for all of them.
    An answer slows them. With many on every engine a session stays where its pages are; as engines
    empty, it moves. A saturated engine gets nothing while another has room.

    Args:
        token_s: seconds between two tokens of a request where so many run: `EngineModel.token_s`
            of the plan, or a table of measurements.
        page_s: seconds that an engine computes on a page of a prompt.
        tokens: answered where the session goes now: one answer times the turns that it may stay.
        saturated: load from which an engine has no room.

    Raises:
        UsageError: a number is negative or infinite, or `saturated` is 0; from a choice, `token_s`
            returns no number.
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
            if isnan(seconds):  # Smaller than nothing, and nothing smaller than it.
                raise UsageError(f"token_s says no number for {others + 1} requests.")
            return engine.load >= self.saturated, seconds

        return min(range(len(_some(engines))), key=added)


def _check_numbers(saturated: float, **numbers: float) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Real) or not 0 <= number < inf:
            raise UsageError(f"needs {name} >= 0, and finite; got {shown(number)}.")
    if not isinstance(saturated, Real) or not saturated > 0:
        raise UsageError(f"needs saturated > 0; got {shown(saturated)}.")
