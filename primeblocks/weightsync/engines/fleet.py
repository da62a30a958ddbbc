"""Several engines, addressed one by one: all of them reach a version, or none does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError, PrimeblocksError
from .remote import Update, call, drive

__all__ = ["UpdateReport", "update_fleet"]


@dataclass(frozen=True)
class UpdateReport:
    """Cost of an update: in all, and from the first pause to the last resume."""

    version: int
    seconds: float
    pause_seconds: float


@dataclass
class _Member:
    """An engine during an update. `known`: it holds what the fleet is to serve."""

    index: int
    engine: Any
    before: tuple[int | None, ...] = ()
    was_paused: bool = False
    known: bool = True
    error: PrimeblocksError | None = None

    @property
    def stays_paused(self) -> bool:
        return (self.was_paused or not self.known) and not self.engine.errored

    async def prepare(self, update: Update, deadline: float) -> None:
        self.was_paused = await call(self.engine, self.engine.is_paused(), "answer", deadline)
        self.before = await drive(self.engine, update.prepare(deadline), "prepare", deadline)

    async def load(self, update: Update, deadline: float) -> None:
        self.known = False
        await drive(self.engine, update.load(deadline), "load", deadline)

    async def commit(self, update: Update, deadline: float) -> None:
        await drive(self.engine, update.commit(), "commit", deadline)
        self.known, self.was_paused = True, False

    async def go_back(self, update: Update, deadline: float) -> None:
        if not self.known and not self.engine.errored:
            steps = update.go_back(self.before, deadline)
            self.known = await drive(self.engine, steps, "go back", deadline)

    async def resume(self, deadline: float) -> None:
        # What is dead would hide its first error behind a second one.
        if not self.stays_paused and not self.engine.errored:
            await call(self.engine, self.engine.resume_generation(), "resume", deadline)


async def _each(members: Sequence[_Member], act: Callable[[_Member], Awaitable[None]]) -> bool:
    """Act on all at once; return whether none has failed so far."""

    async def guarded(member: _Member) -> None:
        try:
            await act(member)
        except PrimeblocksError as error:
            member.error = member.error or error

    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(guarded(member))
    return all(member.error is None for member in members)


def _raise_first(members: Sequence[_Member]) -> None:
    """Raise the error to act on first, with the positions of all engines that met one."""
    failed = [(member, member.error) for member in members if member.error is not None]
    if not failed:
        return
    first = next((e for _, e in failed if isinstance(e, EngineError)), failed[0][1])
    said = str(first)
    if len(members) > 1:
        said = " ".join(f"Engine {m.index} of {len(members)}: {error}" for m, error in failed)
    if paused := [member.index for member in members if member.stays_paused]:
        said += f" Engines {paused} stay paused until an update succeeds."
    first = type(first)(said).with_traceback(first.__traceback__)
    first.engines = tuple(member.index for member, _ in failed)
    raise first


async def update_fleet(
    engines: Sequence[Any],
    update: Update,
    *,
    pause: Mapping[str, Any],
    timeout_s: float,
) -> UpdateReport:
    """Bring every engine to a version, or none.

    All check every byte while they generate; then all pause, load, and go on with the new label.
    If one fails, those that loaded go back. An engine that is not known to hold what the others
    serve, because it hangs or had no version to go back to, stays paused, so it never answers
    with other weights. A second call with the same version is safe, and repairs that.

    Args:
        engines: each has the calls of vLLM's `AsyncLLM` that `Update` makes, and `errored`, once
            it is dead.
        pause: arguments of `pause_generation`.
        timeout_s: for everything; the last two fifths are for going back and for resuming.

    Raises:
        PrimeblocksError: the error of an engine, `EngineError` before others; `.engines` holds the
            positions of all that failed. Drop or restart the dead ones and call again.
    """
    start = time.monotonic()
    work_by, settle_by, resume_by = (start + part * timeout_s for part in (0.6, 0.8, 1.0))
    fleet = [_Member(index, engine) for index, engine in enumerate(engines)]

    async def pause_one(member: _Member) -> None:
        await call(member.engine, member.engine.pause_generation(**pause), "pause", work_by)

    await _each(fleet, lambda member: member.prepare(update, work_by))
    _raise_first(fleet)
    paused_at = time.monotonic()
    try:
        if await _each(fleet, pause_one) and await _each(fleet, lambda m: m.load(update, work_by)):
            await _each(fleet, lambda member: member.commit(update, settle_by))
        else:
            await _each(fleet, lambda member: member.go_back(update, settle_by))
    finally:
        await _each(fleet, lambda member: member.resume(resume_by))
    _raise_first(fleet)
    now = time.monotonic()
    return UpdateReport(update.version, now - start, now - paused_at)
