"""Calls for the front end of vLLM: attach engines once, then update them after each publish.

`update_all` loads a version into all engines of a fleet, or into none. It prepares all engines,
pauses them, loads, then commits or goes back, and resumes. Loading ends at 60 % of `timeout_s`,
going back at 80 %. So if an engine is late, time is left to bring the other engines back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....errors import EngineError, PrimeblocksError, UnsupportedError, UsageError
from ...convert.conversion import Reads
from ...engines.remote import Steps, Update, ask, attach_steps, call, drive, drive_sync
from ...manifest import Manifest
from ...marker import Receipt
from ...observed import Observed
from ...plan import Plan
from ...transports.transport import Transport
from .server import VllmServer

__all__ = [
    "InFlight",
    "UpdateReport",
    "attach",
    "attach_llm",
    "describe",
    "describe_llm",
    "observe",
    "observe_llm",
    "refuse_replicas",
    "update",
    "update_all",
    "update_llm",
]

_RETRY_S, _LOADS_PAGES = 0.02, "Failed to reset KV cache"
_RESUME = ["scheduling"]  # With this tag, `wake_up` resumes only an engine that is all awake.
InFlight = Literal["continue", "recompute", "abort"]
_PAUSE: dict[str, dict[str, Any]] = {
    "continue": {"mode": "keep", "clear_cache": False},
    "recompute": {"mode": "keep", "clear_cache": True},
    "abort": {"mode": "abort", "clear_cache": True},
}


@dataclass(frozen=True)
class UpdateReport:
    """The cost of an update.

    `pause_seconds` is the time from the first pause to the last resume.
    """

    version: int
    seconds: float
    pause_seconds: float


async def describe(engine: Any, checkpoint: Manifest, *, timeout_s: float) -> list[Reads]:
    """Ask every worker of an engine which boxes of a checkpoint the worker's loader reads.

    Pass the result to `plan_sync` as targets. The model's `load_weights` runs once without data,
    between two steps of the engine, and changes no weights.

    Args:
        engine: an `AsyncLLM` or a `VllmServer`.
        checkpoint: the names, global shapes and dtypes of all tensors that the loader takes.

    Raises:
        DeadlineError: the workers did not answer in time.
        EngineError: the engine is dead, or was built without `engine_args()`.
        PrimeblocksError: an error of a worker, raised with the type that it has in the worker.
    """
    deadline = time.monotonic() + timeout_s
    steps = _describe_steps(checkpoint)
    return list(await drive(_until(engine, deadline), steps, "describe", deadline))


async def observe(engine: Any, *, timeout_s: float) -> list[Observed]:
    """Return digests of the weights in an engine's workers, for `verify_engine`.

    Changes nothing. Cost: one pass over the weights, between two steps of the engine.

    Args:
        engine: an attached `AsyncLLM` or `VllmServer`.

    Raises:
        DeadlineError: the engine did not answer in time.
        EngineError: the engine is dead, or was not attached.
    """
    deadline = time.monotonic() + timeout_s
    return list(await drive(_until(engine, deadline), _observe_steps(), "observe", deadline))


async def attach(
    engine: Any, plan: Plan, transport: Transport, *, first_reader: int = 0, timeout_s: float
) -> None:
    """Connect every worker of an engine to a transport. Changes no weights.

    If the plan has one reader, every worker receives the boxes of that reader. If the plan has
    several readers, worker i is reader `first_reader + i`. Each worker checks that the plan sends
    all boxes that the worker reads.

    Args:
        engine: an `AsyncLLM` or a `VllmServer`.
        transport: the publisher's transport, or a reader's transport, such as the transport that
            `find` returns.
        first_reader: the reader number of the engine's first worker.

    Raises:
        UnsupportedError: the workers cannot take updates safely, or the engine has replicas.
        PlanError: the plan was made for other workers.
        DeadlineError: the workers did not answer in time.
        EngineError: the engine is dead, or was built without `engine_args()`.
    """
    deadline = time.monotonic() + timeout_s
    is_server, engine = isinstance(engine, VllmServer), _until(engine, deadline)
    if is_server:
        replicas = await call(engine, engine.replicas(), "answer", deadline)
    else:
        replicas = engine.vllm_config.parallel_config.data_parallel_size
    refuse_replicas(replicas)
    await drive(engine, attach_steps(plan, transport, first_reader), "attach", deadline)


async def update(
    engine: Any, receipt: Receipt, *, in_flight: InFlight = "continue", timeout_s: float
) -> UpdateReport:
    """Load a published version into an engine that may be generating.

    Calls `update_all` for one engine. You may call `update` again after a failure.

    Raises:
        CorruptionError: the received bytes differ from the published bytes. The engine serves the
            old weights.
        TransferError: the version was retired, or loading failed. The engine serves the old
            weights.
        DeadlineError: the update was not done in time. If workers may still be loading, the engine
            stays paused. Call `update` again.
        EngineError: the engine is dead, or only a part of its weights is new. Restart the engine.
    """
    return await update_all([engine], receipt, in_flight=in_flight, timeout_s=timeout_s)


async def update_all(
    engines: Sequence[Any],
    receipt: Receipt,
    *,
    in_flight: InFlight = "continue",
    prefill: Collection[int] = (),
    timeout_s: float,
) -> UpdateReport:
    """Load a published version into all engines, or into none.

    All engines check every byte while they generate. After all checks have passed, the engines
    pause and load. Output tokens carry the label `str(version)`. Cached image features are dropped
    with every value of `in_flight`. If an engine fails, the engines that loaded the new version
    load the previous version again. An engine that hangs, or that could not load the previous
    version again, stays paused until an update succeeds. At any time, all engines that generate
    have the same version. Do not address engines through an HTTP router, because an HTTP router
    passes each call to only one engine.

    Args:
        engines: attached engines, each an `AsyncLLM` or a `VllmServer`.
        receipt: the receipt that `publish` returned.
        in_flight: with "continue", running requests keep the KV cache of the old weights. With
            "recompute", running requests compute their KV cache again with the new weights. This
            pause begins once an engine loads no pages from a KV connector. With "abort", running
            requests end with finish reason "abort". With "continue", the prefix cache also keeps
            pages of the old weights, so use another `cache_salt` for each version.
        prefill: the positions in `engines` of prefill engines, whose KV pages other engines read.
            Prefill engines pause first. The pause of a prefill engine waits until other engines
            have read its pages, at most for `kv_lease_duration` (30 s).
        timeout_s: the time limit for the whole update. The last two fifths of this time are
            reserved for loading the previous version again and for resuming.

    Raises:
        UsageError: `in_flight` is unknown, or a position in `prefill` is out of range. No engine
            was called.
        UnsupportedError: `in_flight` is "recompute", and `prefill` contains some but not all
            engines.
        PrimeblocksError: as for `update`. The error's attribute `engines` has the positions of all
            failed engines. Drop or restart the dead engines and call again.
    """
    _check(in_flight, prefill, len(engines))
    start = time.monotonic()
    work_by, settle_by, resume_by = (start + part * timeout_s for part in (0.6, 0.8, 1.0))
    update, pause = Update(receipt.version), _PAUSE[in_flight]
    fleet = [_Member(index, _until(one, resume_by)) for index, one in enumerate(engines)]

    async def pause_one(member: _Member) -> None:
        wait_s = _RETRY_S
        while True:
            try:
                await call(member.engine, member.engine.pause_generation(**pause), "pause", work_by)
                return
            except EngineError as error:
                # An engine that loads pages from a KV connector cannot clear its cache yet.
                is_final = member.was_paused or time.monotonic() > work_by - wait_s
                if is_final or _LOADS_PAGES not in str(error):
                    raise
            await call(member.engine, member.engine.wake_up(_RESUME), "resume", work_by)
            await asyncio.sleep(wait_s)
            wait_s *= 2

    async def pause_all() -> bool:
        first = [member for member in fleet if member.index in prefill]
        rest = [member for member in fleet if member not in first]
        return await _each(first, pause_one) and await _each(rest, pause_one)

    await _each(fleet, lambda member: member.prepare(update, work_by))
    _raise_first(fleet)
    paused_at = time.monotonic()
    try:
        if await pause_all() and await _each(fleet, lambda m: m.load(update, work_by)):
            await _each(fleet, lambda member: member.commit(update, settle_by))
        else:
            await _each(fleet, lambda member: member.go_back(update, settle_by))
    finally:
        await _each(fleet, lambda member: member.resume(resume_by))
    _raise_first(fleet)
    now = time.monotonic()
    return UpdateReport(update.version, now - start, now - paused_at)


def describe_llm(llm: Any, checkpoint: Manifest) -> list[Reads]:
    """Ask the workers of an offline `LLM`, as `describe` does.

    Blocks. Raises the errors of `describe`.
    """
    return list(drive_sync(llm, _describe_steps(checkpoint)))


def observe_llm(llm: Any) -> list[Observed]:
    """Return digests of the weights in the workers of an offline `LLM`.

    Blocks. Raises the errors of `observe`.
    """
    return list(drive_sync(llm, _observe_steps()))


def attach_llm(llm: Any, plan: Plan, transport: Transport, *, first_reader: int = 0) -> None:
    """Attach an offline `LLM`. Blocks. Raises the errors of `attach`."""
    drive_sync(llm, attach_steps(plan, transport, first_reader))


def update_llm(llm: Any, receipt: Receipt, *, timeout_s: float) -> UpdateReport:
    """Load a published version into an offline `LLM`, between two calls of `generate`.

    Clears the engine's prefix cache, its image features, and the pages of a KV connector that has
    `reset_cache`, such as the connector of `kvoffload`. `timeout_s` limits how long each worker
    waits and checks. `timeout_s` does not limit the call itself, which waits until the engine
    answers.

    Raises:
        EngineError: the load failed, and the workers could not load an earlier version again. Also
            raised if the engine has the new weights but did not clear its KV pages.
        PrimeblocksError: as for `update`.
    """
    start = time.monotonic()
    deadline, made = start + timeout_s, Update(receipt.version)
    before = drive_sync(llm, made.prepare(deadline))
    try:
        drive_sync(llm, made.load(deadline))
    except PrimeblocksError as error:
        if not drive_sync(llm, made.go_back(before, deadline)):
            raise EngineError(
                f"{error} The workers had the versions {before}, and cannot go back to a version. "
                "Restart the engine."
            ) from error
        raise
    llm.llm_engine.reset_encoder_cache()
    drive_sync(llm, made.commit())
    if not llm.reset_prefix_cache(reset_connector=True):
        raise EngineError(
            f"the engine has version {receipt.version}, but did not clear KV pages of earlier "
            "weights, because requests or the engine's last step still hold pages. End all "
            "requests, call generate() once, and call update_llm() again."
        )
    seconds = time.monotonic() - start
    return UpdateReport(receipt.version, seconds, seconds)


@dataclass
class _Member:
    """An engine during an update. `known` says that it holds the version it must serve."""

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
        # Before it resumes, so that no request can use image features of the old weights.
        await call(self.engine, self.engine.reset_encoder_cache(), "forget images", deadline)
        await drive(self.engine, update.commit(), "commit", deadline)
        self.known, self.was_paused = True, False

    async def go_back(self, update: Update, deadline: float) -> None:
        if not self.known and not self.engine.errored:
            steps = update.go_back(self.before, deadline)
            self.known = await drive(self.engine, steps, "go back", deadline)

    async def resume(self, deadline: float) -> None:
        # A call of a dead engine would hide its first error behind a second one.
        if not self.stays_paused and not self.engine.errored:
            await call(self.engine, self.engine.wake_up(_RESUME), "resume", deadline)


def _check(in_flight: str, prefill: Collection[int], engines: int) -> None:
    if in_flight not in _PAUSE:
        raise UsageError(f"in_flight must be one of {list(_PAUSE)}; got {in_flight!r}.")
    if beyond := sorted(set(prefill) - set(range(engines))):
        raise UsageError(
            f"prefill must contain positions of the {engines} engines, counted from 0; got "
            f"{beyond}."
        )
    if in_flight == "recompute" and 0 < len(set(prefill)) < engines:
        raise UnsupportedError(
            'in_flight="recompute" together with prefill engines is not supported. A vLLM engine '
            "that waits for pages of another engine cannot clear its cache, and refuses to pause. "
            'Use "continue" or "abort".'
        )


async def _each(members: Sequence[_Member], act: Callable[[_Member], Awaitable[None]]) -> bool:
    """Act on all members at once. Return whether all have succeeded so far."""

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
    """Raise the most urgent error, with the positions of all engines that failed."""
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


def refuse_replicas(replicas: int) -> None:
    if replicas > 1:
        raise UnsupportedError(
            f"an engine with {replicas} replicas reports only about the first replica. Start one "
            "engine for each replica, and pass all of them to update_all()."
        )


def _until(engine: Any, deadline: float) -> Any:
    """Return an `AsyncLLM` itself, or a server's calls that end by a deadline."""
    return engine.until(deadline) if isinstance(engine, VllmServer) else engine


def _observe_steps() -> Steps:
    answers = yield from ask("primeblocks_observe")
    return [Observed.from_json(answer) for answer in answers]


def _describe_steps(checkpoint: Manifest) -> Steps:
    texts = yield from ask("primeblocks_describe", checkpoint.to_json())
    return [Reads.from_json(text, checkpoint) for text in texts]
