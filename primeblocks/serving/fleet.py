"""A fleet: engines that come and go, what each has, and a route between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from ..errors import EngineError, UsageError, check_counts, shown
from .routes import EngineState, Request, Route, least_loaded

__all__ = ["Fleet", "engines_to_restart"]


def engines_to_restart(restarted: str, agents: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Return the engines that must restart because one did, in their order. Pure.

    An engine that restarts leaves its transfer agent behind in every engine that read from it:
    drain these, restart them, and add them. For transfers that do not notice: NIXL in vLLM where
    the engine comes back under the `engine_id` that it had, or with NIXL up to 1.3 over RDMA.
    vLLM draws an id for each start, and a decode engine of 0.32 with NIXL 1.5 then goes on with
    the new prefill engine (docs/serving_vllm.md).

    Args:
        agents: for each engine those whose agents it holds: of a decode engine its prefill engines,
            and the other way round too where transfers go both ways.

    Raises:
        UsageError: a name is given where several belong, in which parts of it would be found.

    Source: llm-d #2187, vLLM #49238 and #50047.
    """
    if any(isinstance(held, str) for held in agents.values()):
        raise UsageError(f"agents has a collection of names for each engine; got {agents!r:.200}.")
    found = [restarted]
    for gone in found:  # which grows: who restarts leaves an agent behind as well
        found += [name for name, held in agents.items() if gone in held and name not in found]
    return tuple(found[1:])


@dataclass(eq=False)
class _Engine:
    generate: Callable[..., Any]
    max_in_flight: int
    bit: int
    in_flight: int = 0
    is_open: bool = True
    pages: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)


class Fleet:
    """Several engines behind one `generate`, each request to the one that `route` chooses.

    What an engine holds is not asked for: it is believed to hold the pages of the requests that it
    got last. An engine that raises `EngineError` gets no more requests until it is added again; the
    error reaches the caller, whose retry goes elsewhere (`scheduler.Retries`). Local; for one event
    loop.

    Args:
        engines: `generate` callables by name.
        route: chooses among engines that are open.
        describe: makes a `Request` of a call's arguments; by default nothing is known of it.
        max_in_flight: requests that one engine takes, or a number by name.
        cache_pages: pages that one engine holds; 0 where `route` does not look at them.

    Raises:
        UsageError: there is no engine, a number is out of range, or `route` is no function.
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
            raise UsageError(f"needs at least one engine, by name; got {shown(engines)}")
        if not callable(route) or not (describe is None or callable(describe)):
            raise UsageError(f"needs functions; got {shown(route)} and {shown(describe)}")
        self._route, self._describe, self._cache_pages = route, describe, cache_pages
        self._max_in_flight, self._routed = max_in_flight, 0
        self._engines: dict[str, _Engine] = {}
        self._held: dict[Hashable, int] = {}  # by page, a bit for each engine that has it
        for name, generate in engines.items():
            self.add(name, generate)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Await the call of one engine.

        Raises:
            EngineError: from the engine, with its name as a note; or all engines are closed.
        """
        request = Request() if self._describe is None else self._describe(*args, **kwargs)
        name = self.choose(request)
        engine = self._engines[name]
        self._believe(engine, request.pages)
        engine.in_flight += 1
        try:
            return await engine.generate(*args, **kwargs)
        except EngineError as error:
            error.add_note(f"It is engine {name!r} of the fleet.")
            if self._engines.get(name) is engine:
                self.drain(name)
            raise
        finally:
            engine.in_flight -= 1

    def choose(self, request: Request) -> str:
        """Return the name of the engine that gets a request.

        Raises:
            EngineError: no engine is open.
            UsageError: the route names none of those that it was given, or `describe` makes no
                `Request`.
        """
        if not isinstance(request, Request):
            raise UsageError(f"needs a Request, as describe makes it; got {shown(request)}")
        states = self.states(request)
        if not states:
            raise EngineError(f"all {len(self._engines)} engines of the fleet are closed or gone")
        place = self._route(replace(request, ordinal=self._routed), states)
        if not isinstance(place, Integral) or not 0 <= place < len(states):
            raise UsageError(f"the route chose engine {shown(place)} of {len(states)}")
        self._routed += 1
        return states[place].name

    def states(self, request: Request | None = None) -> Sequence[EngineState]:
        """Return the engines that are open, and what they have of `request`."""
        request = Request() if request is None else request
        matched = self._matched(request.pages)
        return [
            EngineState(name, engine.in_flight, engine.max_in_flight, matched.get(engine.bit, 0))
            for name, engine in self._engines.items()
            if engine.is_open
        ]

    def drain(self, name: str) -> None:
        """Give an engine no more requests; it ends those that it has, and its pages are forgotten.

        Raises:
            UsageError: there is none of that name.
        """
        if name not in self._engines:
            raise UsageError(f"no engine {name!r} in the fleet: {list(self._engines)}")
        engine = self._engines[name]
        engine.is_open = False
        self._forget(engine)

    def add(self, name: str, generate: Callable[..., Any]) -> None:
        """Add an engine, or open one again: it holds no page. Give it the current weights first.

        Raises:
            UsageError: `max_in_flight` has no number for it, or it is no function.
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
        """Return the lead pages that each engine holds, by its bit."""
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
        # The last page goes first, as in an engine's own cache.
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
