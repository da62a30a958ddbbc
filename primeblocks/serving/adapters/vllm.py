"""Several vLLM engines that hold one version, behind one `generate`.

vLLM is not imported: an engine is an `AsyncLLM`, or an object with the same calls over HTTP.

A fleet is *unsettled* from the start of an update until it succeeds, and settled after that. An
unsettled fleet gives each request a salt of its own, because its pages may come from old or new
weights. Updates, joins, pauses and resumes run one at a time. An engine is drained if its update
fails while the update of another succeeds. If all fail, the version may be at fault, so all stay
open.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...clock import Clock, MonotonicClock, within
from ...errors import DeadlineError, EngineError, PrimeblocksError, UsageError, check_version
from ...rollout import cache_salt
from .. import Fleet

__all__ = ["FleetMember", "FleetUpdate", "Published", "VllmFleet"]


class Published(Protocol):
    """A version that engines can load, such as the receipt of `weightsync`."""

    @property
    def version(self) -> int: ...


@dataclass(frozen=True)
class FleetMember:
    """One engine of a fleet.

    Args:
        generate: awaits a rollout of a prompt. It takes `cache_salt=` and options of its own.
        engine: the target of `update` and of control calls. It is an `AsyncLLM`, or an object
            whose `until(deadline)` returns its calls over HTTP (weightsync's `VllmServer`).
        is_prefill: other engines read pages from this engine. It is paused before the other
            engines, and its pause waits until they have read the pages that it computed.
    """

    generate: Callable[..., Awaitable[Any]]
    engine: Any
    is_prefill: bool = False


@dataclass(frozen=True)
class FleetUpdate:
    """The outcome of an update: the engines that hold the version, and the drained engines."""

    version: int
    held_by: tuple[str, ...]
    drained: Mapping[str, PrimeblocksError]


class VllmFleet:
    """Several engines that hold one version, behind one `generate`.

    Requests follow the route of `serving.Fleet`, which closes an engine that raises `EngineError`.
    Control calls and updates go directly to every open engine. `join` opens an engine again, with
    the current version. Use a fleet from one event loop.

    Args:
        members: by name.
        update: `update(engines, published, timeout_s=)` loads a version into all `engines` or into
            none. The attribute `engines` of its error lists the positions of failed engines. If
            some engines are prefill engines, `update` also gets their positions as `prefill=`. You
            can pass weightsync's `update_all`.
        through: the `generate` of a router, which then gets all requests instead of the members.
            The router does not learn which engines are drained.
        clock: of deadlines.
        options: of `serving.Fleet`.

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
        self._change, self._is_settled = asyncio.Lock(), False
        self._unsettled = itertools.count()

    @property
    def version(self) -> int | None:
        """The version of the last update, or None before the first."""
        return None if self._published is None else self._published.version

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the engines that get requests and updates."""
        return tuple(state.name for state in self._fleet.states())

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Await the call of one engine, with the salt of the fleet's version.

        Raises:
            EngineError: raised by the engine, or no engine is open, or no version was loaded yet.
        """
        if self.version is None:
            raise EngineError("no engine of the fleet has a version yet. Call update() first.")
        salt = cache_salt(self.version)
        if not self._is_settled:
            salt = f"{salt}-unsettled-{next(self._unsettled)}"
        ask = self._fleet if self._through is None else self._through
        return await ask(*args, cache_salt=salt, **kwargs)

    async def update(self, published: Published, *, timeout_s: float) -> FleetUpdate:
        """Load a version into all open engines, and drain engines that fail while others succeed.

        Each attempt gets half of the time that is left. A drained engine may hold either version,
        and may stay paused.

        Raises:
            PrimeblocksError: all engines failed. No engine is drained, the fleet keeps its version,
                and requests share no pages until an update succeeds.
            DeadlineError: the update did not end within `timeout_s`. Call it again.
            EngineError: no engine is open.
            UsageError: the version is below the fleet's.
        """
        check_version(published.version)
        what = f"the update of the fleet to version {published.version}"
        return await self._next(lambda end: self._update_open(published, end), timeout_s, what)

    async def join(self, name: str, member: FleetMember, *, timeout_s: float) -> None:
        """Load the current version into an engine, check that it reports this version, and open it.

        The name is new, or that of a drained engine. The engine must know where weights come from
        (weightsync's `attach`).

        Raises:
            PrimeblocksError: the engine did not load the version, or reports another. It stays
                closed.
            DeadlineError: the engine was not open within `timeout_s`.
        """
        what = f"the opening of engine {name!r}"
        await self._next(lambda end: self._join(name, member, end), timeout_s, what)

    def drain(self, name: str) -> None:
        """Send an engine no more requests and updates. It completes the requests that it has.

        Raises:
            UsageError: no engine has that name.
        """
        self._fleet.drain(name)

    async def versions(self, *, timeout_s: float) -> dict[str, str]:
        """Ask every open engine for the label of its weights.

        Raises:
            DeadlineError, EngineError: some engines did not answer, or refused. The message names
                them. All engines were asked.
        """
        return await self._each("get_weight_version", self._clock.now() + timeout_s)

    async def pause(self, *, mode: str, clear_cache: bool, timeout_s: float) -> None:
        """Pause every open engine, as vLLM's `pause_generation` does. Errors as `versions`.

        It waits for a running update. A later update ends the pause (`update_all`): engines resume
        with the new version.
        """
        await self._control("pause_generation", timeout_s, mode=mode, clear_cache=clear_cache)

    async def resume(self, *, timeout_s: float) -> None:
        """Resume every open engine after a running update has ended. Errors as `versions`."""
        await self._control("resume_generation", timeout_s)

    async def _control(self, method: str, timeout_s: float, **arguments: Any) -> None:
        what = f"{method} of the fleet"
        await self._next(lambda end: self._each(method, end, **arguments), timeout_s, what)

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
        self._published, self._is_settled = published, True
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
        if self._published is not None:
            await self._load([member], self._published, end)
            label = await self._call(member, "get_weight_version", end)
            if label != str(self.version):
                raise EngineError(
                    f"engine {name!r} reports version {label!r} after an update to version "
                    f"{self.version}, so it is not opened. Join it again."
                )
        self._fleet.add(name, member.generate)
        self._members[name] = member

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
