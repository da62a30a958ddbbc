"""A fleet of engines behind one callable: which are open, what each holds, and a route.

An engine is open from `add` until `drain`, or until it raises `EngineError`. Only open engines get
requests. The fleet does not ask an engine for its cache. It remembers the pages that the engine was
sent last, at most `cache_pages`. `drain` and `add` forget them.
"""

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
    drain these, restart them, and add them. This is needed only if transfers do not notice the
    restart. In vLLM these are transfers by NIXL up to 1.3 over RDMA. They are also transfers by any
    NIXL if the engine comes back under its previous `engine_id`. By default vLLM draws a new id for
    each start (docs/serving_vllm.md).

    Args:
        agents: for each engine, the engines whose agents it holds. A decode engine holds those of
            its prefill engines. If transfers go both ways, the reverse holds too.

    Raises:
        UsageError: a value is one name instead of a collection of names.

    Source: llm-d #2187, vLLM #49238 and #50047.
    """
    if any(isinstance(held, str) for held in agents.values()):
        raise UsageError(f"agents needs a collection of names per engine; got {agents!r:.200}.")
    found = [restarted]
    for gone in found:  # Grows meanwhile: each engine that restarts leaves an agent behind too.
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
    """Several engines behind one `generate`. `route` chooses the engine of each request.

    The fleet does not ask engines for their caches. It assumes that an engine holds the pages of
    its last requests. An engine that raises `EngineError` gets no more requests until it is added
    again. The error reaches the caller, and a retry goes to another engine (`scheduler.Retries`).
    Local. Use a fleet from one event loop.

    Args:
        engines: `generate` callables by name.
        route: chooses among the open engines.
        describe: makes a `Request` from the arguments of a call. By default a request has no facts.
        max_in_flight: the requests that one engine takes: one number, or a number by name.
        cache_pages: the pages that one engine holds. Use 0 if `route` does not use pages.

    Raises:
        UsageError: `engines` is empty, a number is out of range, or `route` is not a function.
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
            raise UsageError(
                f"route and describe need to be functions; got {shown(route)} and {shown(describe)}"
            )
        self._route, self._describe, self._cache_pages = route, describe, cache_pages
        self._max_in_flight, self._routed = max_in_flight, 0
        self._engines: dict[str, _Engine] = {}
        self._held: dict[Hashable, int] = {}  # by page, a bit for each engine that has it
        for name, generate in engines.items():
            self.add(name, generate)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Await the call of one engine.

        Raises:
            EngineError: raised by the engine, with its name as a note, or no engine is open.
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
            UsageError: the route returned no position among the open engines, or `describe`
                returned no `Request`.
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
        """Return the state of each open engine, including the pages of `request` it holds."""
        request = Request() if request is None else request
        matched = self._matched(request.pages)
        return [
            EngineState(name, engine.in_flight, engine.max_in_flight, matched.get(engine.bit, 0))
            for name, engine in self._engines.items()
            if engine.is_open
        ]

    def drain(self, name: str) -> None:
        """Send an engine no more requests. It completes its own, and its pages are forgotten.

        Raises:
            UsageError: no engine has that name.
        """
        if name not in self._engines:
            raise UsageError(f"no engine {name!r} in the fleet: {list(self._engines)}")
        engine = self._engines[name]
        engine.is_open = False
        self._forget(engine)

    def add(self, name: str, generate: Callable[..., Any]) -> None:
        """Add an engine, or open it again, without pages. Give it the current weights first.

        Raises:
            UsageError: `max_in_flight` has no number for its name, or `generate` is not a function.
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
