"""A fleet of engines behind one callable, and routes, which choose the engine of each request.

An engine is open from `add` until `drain`, or until it raises `EngineError`. Only open engines get
requests. The fleet does not ask an engine for its cache, but remembers the last `cache_pages` pages
that were sent to each engine. `drain` and `add` forget the pages of an engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Integral, Real
from typing import Any

import xxhash

from ..errors import EngineError, UsageError, check_counts, shown

__all__ = [
    "EngineState",
    "Fleet",
    "PrefixAndLoad",
    "Request",
    "Route",
    "consistent_hash",
    "engines_to_restart",
    "least_loaded",
    "round_robin",
]


@dataclass(frozen=True, slots=True)
class Request:
    """The properties of a request that a route uses to choose an engine.

    Args:
        session: a text that identifies the conversation of the request.
        pages: names of the full pages of the prompt, in order. Each name must include the cache
            salt, so that pages of two policy versions have different names.
            `kvoffload.page_hashes` computes hashes of pages, without the salt.
        ordinal: the number of earlier requests to the fleet.
    """

    session: str = ""
    pages: tuple[Hashable, ...] = ()
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of one engine that may get a request.

    Args:
        name: name of the engine in the fleet.
        in_flight: number of unfinished requests of the engine. Requests that failed since one
            succeeded count too, until the fleet has sent some further requests. So an engine that
            refuses quickly is not the least loaded, and is tried again.
        max_in_flight: the largest number of requests that the engine can process at once.
            Additional requests wait for other requests or for space in the cache.
        matched: number of the request's leading pages that the engine is assumed to cache.

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
        """The number of requests in flight, divided by `max_in_flight`."""
        return self.in_flight / self.max_in_flight


_SUSPECT = 16  # Requests of the fleet per failure, for at most as many failures.

Route = Callable[[Request, Sequence[EngineState]], int]
"""A function that returns a position in a sequence of engines. The sequence is not empty."""


def _some(engines: Sequence[EngineState]) -> Sequence[EngineState]:
    if not engines:
        raise UsageError("a route needs at least one open engine; got none.")
    return engines


def round_robin(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose the engines in turn. Pure."""
    return request.ordinal % len(_some(engines))


def least_loaded(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose the engine with the lowest load, or the first of equally loaded engines. Pure."""
    return min(range(len(_some(engines))), key=lambda place: engines[place].load)


def consistent_hash(request: Request, engines: Sequence[EngineState]) -> int:
    """Choose the same engine for all requests of a session, whatever the load. Pure.

    If an engine leaves, only its sessions move. If an engine joins, sessions move only to the new
    engine. Use this route only for comparisons, because a session stays with a saturated engine
    while other engines are idle.

    Source: highest random weight, Thaler and Ravishankar 1998.
    """

    def weight(place: int) -> int:
        both = f"{engines[place].name}\0{request.session}"
        # JSON may contain half a surrogate pair, which is a name like any other.
        return xxhash.xxh3_64_intdigest(both.encode(errors="surrogatepass"))

    return max(range(len(_some(engines))), key=weight)


@dataclass(frozen=True)
class PrefixAndLoad:
    """A route that prefers engines with cached pages of the prompt and a low load.

    The score of an engine is the cached fraction of the prompt's pages, minus `beta` times the
    relative load. The relative load is the engine's number of requests in flight, divided by the
    mean number over all engines or by 1, whichever is larger. A saturated engine gets a request
    only if all engines are saturated. If a session moves, the new engine computes the pages of the
    prompt that it has not cached.

    Args:
        beta: the weight of the relative load in the score. With `beta=0`, the score is the cached
            fraction. With a larger `beta`, sessions move sooner to engines with a lower load.
        saturated: the smallest load at which an engine counts as saturated.

    Raises:
        UsageError: `beta` is negative, `saturated` is not above 0, or one of them is not finite.

    Source: the score is that of vLLM's production-stack, #1035.
    """

    beta: float = 0.4
    saturated: float = 1.0

    def __post_init__(self) -> None:
        needs = "PrefixAndLoad needs a finite"
        if not isinstance(self.beta, Real) or not 0 <= self.beta < inf:
            raise UsageError(f"{needs} beta >= 0; got {shown(self.beta)}.")
        if not isinstance(self.saturated, Real) or not 0 < self.saturated < inf:
            raise UsageError(f"{needs} saturated > 0; got {shown(self.saturated)}.")

    def __call__(self, request: Request, engines: Sequence[EngineState]) -> int:
        # At least 1: with few requests, one more or less means little.
        mean = max(1.0, sum(engine.in_flight for engine in engines) / len(_some(engines)))

        def score(place: int) -> tuple[bool, float, float]:
            engine = engines[place]
            held = engine.matched / max(1, len(request.pages))
            has_room = engine.load < self.saturated
            return has_room, held - self.beta * engine.in_flight / mean, -engine.load

        return max(range(len(engines)), key=score)


def engines_to_restart(restarted: str, agents: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return the engines that must also restart after an engine restarted. Pure.

    An engine that restarts leaves its old transfer agent in every engine that read from it. Drain,
    restart and add the returned engines. The engines that read directly from the restarted engine
    come first. In vLLM, these restarts are needed with NIXL up to 1.3 over RDMA, and with any NIXL
    version if the restarted engine keeps its `engine_id`.

    Args:
        agents: for the name of each engine, the names of engines whose transfer agents the engine
            stores. A decode engine stores the agents of its prefill engines. With transfers in both
            directions, a prefill engine also stores the agents of its decode engines.

    Raises:
        UsageError: a value of `agents` is a string instead of a collection of names.

    Source: llm-d #2187, vLLM #49238 and #50047.
    """
    if any(isinstance(held, str) for held in agents.values()):
        raise UsageError(f"agents must have a collection of names per engine; got {agents!r:.200}.")
    found = [restarted]
    for gone in found:  # Grows meanwhile: each engine that restarts leaves an agent behind too.
        found += [name for name, held in agents.items() if gone in held and name not in found]
    return tuple(found[1:])


@dataclass(eq=False)
class _Engine:
    generate: Callable[..., Any]
    max_in_flight: int
    bit: int
    is_open: bool = True
    failed: int = 0  # Requests since the last success.
    suspect_until: int = 0  # Its failures count as load until the fleet has routed this many.
    pages: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)


class Fleet:
    """A fleet of engines behind one `generate`. `route` chooses the engine of each request.

    If an engine raises `EngineError`, the fleet drains the engine and raises the error. The failed
    engine gets requests again only after you `add` it. Local. Use a fleet from one event loop.

    Args:
        engines: the `generate` functions of engines by name.
        route: a function that chooses one of the open engines.
        describe: a function that returns a `Request` for the arguments of a call. The default
            returns an empty `Request`.
        max_in_flight: the largest number of requests that an engine can process at once, or a
            mapping of engine names to numbers. The fleet does not refuse or delay requests above
            this number.
        cache_pages: the number of pages that one engine can cache. Use 0 if `route` does not use
            pages.

    Raises:
        UsageError: `engines` is empty, a number is out of range, or `route` or `describe` is not a
            function.
    """

    def __init__(
        self,
        engines: Mapping[str, Callable[..., Any]],
        *,
        route: Route = least_loaded,
        describe: Callable[..., Request] | None = None,
        max_in_flight: int | Mapping[str, int] = 64,
        cache_pages: int = 0,
    ) -> None:
        check_counts(least=0, cache_pages=cache_pages)
        if not isinstance(engines, Mapping) or not engines:
            raise UsageError(f"Fleet needs at least one engine, by name; got {shown(engines)}")
        if not callable(route) or not (describe is None or callable(describe)):
            raise UsageError(
                f"route and describe must be functions; got {shown(route)} and {shown(describe)}"
            )
        self._route, self._describe, self._cache_pages = route, describe, cache_pages
        self._max_in_flight, self._routed = max_in_flight, 0
        self._engines: dict[str, _Engine] = {}
        self._in_flight: Counter[str] = Counter()  # by name, because requests outlive an `add`
        self._held: dict[Hashable, int] = {}  # by page, a bit for each engine that has it
        for name, generate in engines.items():
            self.add(name, generate)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Await the call of one engine.

        Raises:
            EngineError: the engine raised this error, or no engine is open. In the first case, a
                note of the error contains the engine's name.
        """
        request = Request() if self._describe is None else self._describe(*args, **kwargs)
        name = self.choose(request)
        engine = self._engines[name]
        self._believe(engine, request.pages)
        self._in_flight[name] += 1
        try:
            answer = await engine.generate(*args, **kwargs)
        except EngineError as error:
            note = f"This error is from engine {name!r} of the fleet."
            if note not in getattr(error, "__notes__", ()):  # An engine may raise one error often.
                error.add_note(note)
            if self._engines.get(name) is engine:
                self.drain(name)
            raise
        except Exception:
            engine.failed += 1
            engine.suspect_until = self._routed + _SUSPECT * min(engine.failed, _SUSPECT)
            raise
        else:
            engine.failed = 0
            return answer
        finally:
            self._in_flight[name] -= 1

    def choose(self, request: Request) -> str:
        """Choose an engine for a request, and return the name of the engine.

        Raises:
            EngineError: all engines are closed.
            UsageError: the route did not return a position in the sequence of open engines, or
                `request` is not a `Request`.
        """
        if not isinstance(request, Request):
            raise UsageError(
                f"choose() needs a Request, as describe makes it; got {shown(request)}"
            )
        states = self.states(request)
        if not states:
            raise EngineError(
                f"all {len(self._engines)} engines of the fleet are closed. Add an engine with "
                "add()."
            )
        place = self._route(replace(request, ordinal=self._routed), states)
        if not isinstance(place, Integral) or not 0 <= place < len(states):
            raise UsageError(f"the route chose engine {shown(place)} of {len(states)}")
        self._routed += 1
        return states[place].name

    def states(self, request: Request | None = None) -> Sequence[EngineState]:
        """Return the state of each open engine, where `matched` counts pages of `request`."""
        request = Request() if request is None else request
        matched = self._matched(request.pages)
        return [
            EngineState(
                name,
                self._in_flight[name] + engine.failed * (self._routed < engine.suspect_until),
                engine.max_in_flight,
                matched.get(engine.bit, 0),
            )
            for name, engine in self._engines.items()
            if engine.is_open
        ]

    def drain(self, name: str) -> None:
        """Stop sending requests to an engine, and forget its pages. Running requests complete.

        Raises:
            UsageError: the fleet does not have an engine `name`.
        """
        if name not in self._engines:
            raise UsageError(
                f"the fleet has no engine {name!r}; its engines are {list(self._engines)}"
            )
        engine = self._engines[name]
        engine.is_open = False
        self._forget(engine)

    def add(self, name: str, generate: Callable[..., Any]) -> None:
        """Add a new engine, or open a drained engine, with an empty list of cached pages.

        Before this call, load the current weights into the engine. Requests that still run on a
        drained engine stay in its `EngineState.in_flight`, so give `generate` a deadline.

        Raises:
            UsageError: `max_in_flight` does not contain `name`, or `generate` is not a function.
        """
        limit = self._max_in_flight
        most = limit.get(name, 0) if isinstance(limit, Mapping) else limit
        check_counts(**{f"max_in_flight of engine {name!r}": most})
        if not callable(generate):
            raise UsageError(f"engine {name!r} must be a function; got {shown(generate)}")
        if (before := self._engines.get(name)) is not None:
            self._forget(before)
        bit = 1 << len(self._engines) if before is None else before.bit
        self._engines[name] = _Engine(generate, most, bit)

    def _matched(self, pages: Sequence[Hashable]) -> dict[int, int]:
        """Return the number of leading pages that each engine holds, by its bit."""
        if not self._cache_pages:
            return {}
        found, here = {}, (1 << len(self._engines)) - 1
        for count, page in enumerate([*pages, None]):
            still = here & self._held.get(page, 0) if count < len(pages) else 0
            gone = here & ~still
            while gone:
                bit = gone & -gone
                found[bit] = count
                gone ^= bit
            if not (here := still):
                break
        return found

    def _believe(self, engine: _Engine, pages: Sequence[Hashable]) -> None:
        if not self._cache_pages:
            return
        # The last page is evicted first, as in an engine's own cache.
        for page in reversed(pages[: self._cache_pages]):
            engine.pages[page] = None
            engine.pages.move_to_end(page)
            self._held[page] = self._held.get(page, 0) | engine.bit
        while len(engine.pages) > self._cache_pages:
            self._leave(engine, engine.pages.popitem(last=False)[0])

    def _forget(self, engine: _Engine) -> None:
        for page in engine.pages:
            self._leave(engine, page)
        engine.pages.clear()

    def _leave(self, engine: _Engine, page: Hashable) -> None:
        self._held[page] &= ~engine.bit
        if not self._held[page]:
            del self._held[page]
