"""A fleet of vLLM engines with one version of the weights, behind one `generate`.

The module does not import vLLM. An engine is an `AsyncLLM`, or an object that makes the calls of
`AsyncLLM` over HTTP. Engines may outlive a fleet and still have its pages, so the cache salts of
each `VllmFleet` contain a random name.

A fleet is *unsettled* from the start of an update until an update succeeds. In an unsettled fleet,
each request has its own cache salt, because pages may come from old or new weights. If an update
loads another publish of the fleet's version, as its `digest` shows, the fleet stays unsettled.
Updates, pauses and resumes run one at a time. A join loads weights beside them, and waits for its
turn to open the engine. If an update fails on all engines, the cause may be the version, so all
engines stay open.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Protocol

from ...clock import Clock, MonotonicClock, within
from ...errors import DeadlineError, EngineError, PrimeblocksError, UsageError, check_version
from ...rollout import cache_salt
from .. import Fleet

__all__ = ["FleetMember", "FleetUpdate", "Published", "VllmFleet"]


class Published(Protocol):
    """A published version that engines can load, such as a receipt of `weightsync`.

    A fleet also reads the attribute `digest`, if there is one. Without `digest`, the fleet does not
    notice that two publishes of one version have different weights.
    """

    @property
    def version(self) -> int: ...


@dataclass(frozen=True)
class FleetMember:
    """One engine of a fleet.

    Args:
        generate: an async function that returns a rollout of a prompt. The function must accept
            `cache_salt`, and may accept other options.
        engine: the `AsyncLLM` that gets updates and control calls, or an object such as
            weightsync's `VllmServer`. The method `until(deadline)` of such an object returns an
            object that makes control calls over HTTP.
        is_prefill: whether other engines read pages from this engine. A prefill engine is paused
            first, and the pause waits until other engines have read the computed pages.
    """

    generate: Callable[..., Awaitable[Any]]
    engine: Any
    is_prefill: bool = False


@dataclass(frozen=True)
class FleetUpdate:
    """The result of an update: the engines with the new version, and the drained engines."""

    version: int
    held_by: tuple[str, ...]
    drained: Mapping[str, PrimeblocksError]


class VllmFleet:
    """A fleet of vLLM engines with one version of the weights, behind one `generate`.

    A `serving.Fleet` routes requests, and drains an engine that raises `EngineError`. Control calls
    and updates go directly to every open engine. `join` loads the current version into a
    drained engine, and then opens the engine. Use a fleet from one event loop.

    Args:
        members: the engines by name.
        update: an async function such as weightsync's `update_all`. The call
            `update(engines, published, timeout_s=)` loads a version into all `engines` or into
            none. The attribute `engines` of a raised error lists the positions of failed engines.
            If some engines are prefill engines, `update` also gets their positions as `prefill=`.
        through: the `generate` function of a router. All requests go to the router instead of to
            `members`. The router does not know which engines are drained.
        clock: the clock for deadlines.
        options: keyword arguments of `serving.Fleet`.

    Raises:
        UsageError: as for `serving.Fleet`.
    """

    def __init__(
        self,
        members: Mapping[str, FleetMember],
        *,
        update: Callable[..., Awaitable[Any]],
        through: Callable[..., Awaitable[Any]] | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self._members = dict(members)
        self._fleet = Fleet({name: each.generate for name, each in members.items()}, **options)
        self._update, self._through = update, through
        self._clock = MonotonicClock() if clock is None else clock
        self._published: Published | None = None
        self._first: Published | None = None  # first publish of the version, owner of its salt
        self._change, self._is_settled = asyncio.Lock(), False
        self._joins = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._paused: dict[str, Any] | None = None  # The arguments of a pause that still holds.
        self._name, self._unsettled = token_hex(4), itertools.count()

    @property
    def version(self) -> int | None:
        """The version of the last update that succeeded, or None before the first update."""
        return None if self._published is None else self._published.version

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the engines that get requests and updates."""
        return tuple(state.name for state in self._fleet.states())

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of an engine, or of the router, with the fleet's current cache salt.

        Raises:
            EngineError: the engine raised this error, all engines are closed, or the fleet has not
                loaded a version yet.
        """
        if self.version is None:
            raise EngineError("no engine of the fleet has a version yet. Call update() first.")
        salt = f"{cache_salt(self.version)}-{self._name}"
        if not self._is_settled:
            salt = f"{salt}-unsettled-{next(self._unsettled)}"
        ask = self._fleet if self._through is None else self._through
        return await ask(*args, cache_salt=salt, **kwargs)

    async def update(self, published: Published, *, timeout_s: float) -> FleetUpdate:
        """Load a version into all open engines. If only some engines fail, drain these engines.

        Each attempt to load the version gets half of the remaining time. A drained engine may have
        the old or the new version, and may stay paused.

        Raises:
            PrimeblocksError: all engines failed. All engines stay open, the fleet keeps its
                version, and requests do not share pages until an update succeeds.
            DeadlineError: the update did not end within `timeout_s`. Call `update` again.
            EngineError: all engines are closed.
            UsageError: the version is lower than the fleet's version.
        """
        check_version(published.version)
        what = f"the update of the fleet to version {published.version}"
        return await self._next(lambda end: self._update_open(published, end), timeout_s, what)

    async def join(self, name: str, member: FleetMember, *, timeout_s: float) -> None:
        """Load the current version into an engine, check the engine's version, and open the engine.

        The call opens the engine only if the engine reports the current version. Before the first
        update, the engine is opened without a check. An open engine gets requests and updates.
        If another engine is open, other calls do not wait for this load. If the fleet gets a newer
        version during the load, the engine loads again, and other calls wait for the second load.
        If the fleet is paused, the engine is paused before it is opened.
        `name` is a new name, or the name of an engine that this engine replaces. Before this call,
        connect the engine to the source of weights (weightsync's `attach`).

        Raises:
            PrimeblocksError: the engine did not load the version, or reports another version. The
                engine stays closed.
            DeadlineError: the engine was not open within `timeout_s`.
        """
        what = f"the opening of engine {name!r}"
        joined = self._join(name, member, self._clock.now() + timeout_s)
        await within(joined, timeout_s=timeout_s, clock=self._clock, what=what)

    def drain(self, name: str) -> None:
        """Stop sending requests and updates to an engine. Running requests complete.

        Raises:
            UsageError: the fleet does not have an engine `name`.
        """
        self._fleet.drain(name)

    async def versions(self, *, timeout_s: float) -> dict[str, str]:
        """Return the weight label of every open engine, by name of the engine.

        Raises:
            DeadlineError, EngineError: some engines did not answer, or raised an error. The message
                names the failed engines. The call asks all open engines before it raises the error.
        """
        return await self._each("get_weight_version", self._clock.now() + timeout_s)

    async def pause(self, *, mode: str, clear_cache: bool, timeout_s: float) -> None:
        """Call vLLM's `pause_generation` on every open engine. Raises the errors of `versions`.

        The call waits for a running update. A later update with `update_all` ends the pause, and
        engines resume with the new version.
        """
        await self._control("pause_generation", timeout_s, mode=mode, clear_cache=clear_cache)

    async def resume(self, *, timeout_s: float) -> None:
        """Resume every open engine after a running update. Raises the errors of `versions`.

        Engines of which a part sleeps stay paused.
        """
        await self._control("wake_up", timeout_s, tags=["scheduling"])

    async def _control(self, method: str, timeout_s: float, **arguments: Any) -> None:
        async def change(end: float) -> None:
            self._paused = arguments if method == "pause_generation" else None
            await self._each(method, end, **arguments)

        await self._next(change, timeout_s, f"{method} of the fleet")

    async def _next(
        self, change: Callable[[float], Awaitable[Any]], timeout_s: float, what: str
    ) -> Any:
        """Make a change once earlier changes have ended."""
        end = self._clock.now() + timeout_s

        async def alone() -> Any:
            async with self._change:
                return await change(end)

        return await within(alone(), timeout_s=timeout_s, clock=self._clock, what=what)

    async def _update_open(self, published: Published, end: float) -> FleetUpdate:
        names, failed = list(self.open), dict[str, PrimeblocksError]()
        if not names:
            raise EngineError(
                f"all {len(self._members)} engines of the fleet are drained. Add an engine with "
                "join()."
            )
        if self.version is not None and published.version < self.version:
            raise UsageError(
                f"update() got version {published.version} after version {self.version}. Requests "
                "would reuse the salts of earlier versions, and so read pages of other weights. "
                "Publish these weights under a higher version."
            )
        self._is_settled = False
        while True:
            try:
                await self._load([self._members[name] for name in names], published, end)
                break
            except PrimeblocksError as error:
                lost = [names[place] for place in error.engines] or names
                if len(lost) == len(names):
                    raise
                failed |= dict.fromkeys(lost, error)
                names = [name for name in names if name not in lost]
        if self._first is None or published.version > self._first.version:
            self._first = published
        self._published, self._paused = published, None
        self._is_settled = _digest(published) == _digest(self._first)
        for name, met in failed.items():
            self._fleet.drain(name)
            logging.getLogger(__name__).warning(
                "engine %r is drained, because it did not load version %d. The engines %s now "
                "have this version. %s: %s",
                name,
                published.version,
                names,
                type(met).__name__,
                met,
            )
        return FleetUpdate(published.version, tuple(names), failed)

    async def _join(self, name: str, member: FleetMember, end: float) -> None:
        async with self._joins[name]:
            async with self._change:  # A running update brings a newer version.
                # An update would load into an open engine at the same time, or find no engine.
                if name in self.open or not self.open:
                    return await self._open(name, member, None, end)
            loaded, failure = self._published, None
            try:
                await self._load_checked(name, member, loaded, end)
            except PrimeblocksError as error:
                failure = error
            async with self._change:
                if failure is not None and self._published is loaded:
                    raise failure
                await self._open(name, member, loaded, end)

    async def _open(
        self, name: str, member: FleetMember, loaded: Published | None, end: float
    ) -> None:
        if self._published is not loaded:
            await self._load_checked(name, member, self._published, end)
        if self._paused is not None:
            await self._call(member, "pause_generation", end, **self._paused)
        self._fleet.add(name, member.generate)
        self._members[name] = member

    async def _load_checked(
        self, name: str, member: FleetMember, published: Published | None, end: float
    ) -> None:
        if published is None:
            return
        await self._load([member], published, end)
        label = await self._call(member, "get_weight_version", end)
        if label != str(published.version):
            raise EngineError(
                f"engine {name!r} reports version {label!r} after an update to version "
                f"{published.version}, so it is not opened. Join it again."
            )

    async def _load(self, members: Sequence[FleetMember], published: Published, end: float) -> None:
        engines = [member.engine for member in members]
        prefill = [place for place, member in enumerate(members) if member.is_prefill]
        told = {"prefill": prefill} if prefill else {}
        await self._update(engines, published, timeout_s=(end - self._clock.now()) / 2, **told)

    async def _call(self, member: FleetMember, method: str, end: float, **arguments: Any) -> Any:
        calls = member.engine.until(end) if hasattr(member.engine, "until") else member.engine
        called, left_s = getattr(calls, method)(**arguments), end - self._clock.now()
        return await within(called, timeout_s=left_s, clock=self._clock, what=method)

    async def _each(self, method: str, end: float, **arguments: Any) -> dict[str, Any]:
        names, answers = self.open, dict[str, Any]()
        for is_prefill in (True, False):
            some = [name for name in names if self._members[name].is_prefill is is_prefill]
            calls = [self._call(self._members[name], method, end, **arguments) for name in some]
            said_by = await asyncio.gather(*calls, return_exceptions=True)
            answers |= zip(some, said_by, strict=True)
        failed = {name: each for name, each in answers.items() if isinstance(each, BaseException)}
        if failed:
            late = all(isinstance(each, DeadlineError) for each in failed.values())
            said = "; ".join(f"engine {name!r}: {error!r}" for name, error in failed.items())
            kind = DeadlineError if late else EngineError
            raise kind(f"{method} failed on {len(failed)} of {len(names)} engines. {said}")
        return answers


def _digest(published: Published) -> Any:
    return getattr(published, "digest", None)
