"""Calls for the front end of vLLM: attach engines once, update them after each publish."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ....errors import EngineError, UnsupportedError, UsageError
from ...convert.recorded import Reads
from ...engines.fleet import UpdateReport, update_fleet
from ...engines.remote import (
    Step,
    Steps,
    Update,
    attach_steps,
    call,
    drive,
    drive_sync,
    update_sync,
)
from ...manifest import Manifest
from ...marker import Receipt
from ...plan import Plan
from ...transports.transport import Transport
from .server import VllmServer

__all__ = [
    "InFlight",
    "attach",
    "attach_llm",
    "describe",
    "describe_llm",
    "update",
    "update_all",
    "update_llm",
]

InFlight = Literal["continue", "recompute", "abort"]
_PAUSE: dict[str, dict[str, Any]] = {
    "continue": {"mode": "keep", "clear_cache": False},
    "recompute": {"mode": "keep", "clear_cache": True},
    "abort": {"mode": "abort", "clear_cache": True},
}


@dataclass(frozen=True)
class _Request:
    """Arguments of vLLM's calls, which read only these fields of its own request classes."""

    init_info: dict[str, Any] = field(default_factory=dict)
    update_info: dict[str, Any] = field(default_factory=dict)


async def describe(engine: Any, checkpoint: Manifest, *, timeout_s: float) -> list[Reads]:
    """Ask every worker of an engine what its loader reads of a checkpoint. No weights change.

    They are the targets of `plan_sync`: each worker reads its own boxes.
    Local; the model's own `load_weights` runs once without data, between two steps of the engine.

    Args:
        engine: an `AsyncLLM`, or a `VllmServer`.
        checkpoint: all tensors, by the names, global shapes and dtypes that the loader takes.

    Raises:
        DeadlineError: they did not answer in time.
        EngineError: the engine is dead, was built without `engine_args()`, or a worker failed.
    """
    deadline = time.monotonic() + timeout_s
    if isinstance(engine, VllmServer):
        engine = engine.until(deadline)
    return list(await drive(engine, _describe_steps(checkpoint), "describe", deadline))


async def attach(
    engine: Any, plan: Plan, transport: Transport, *, first_reader: int = 0, timeout_s: float
) -> None:
    """Tell every worker of an engine where weights will come from. No weights change.

    Where the plan has one reader, all workers are that one. Where it has several, worker i is
    reader `first_reader + i`, and looks whether the plan has all that it reads.

    Args:
        engine: an `AsyncLLM`, or a `VllmServer`.

    Raises:
        UnsupportedError: the workers cannot take updates safely, or there are replicas.
        PlanError: the plan was made for other workers.
        DeadlineError: they did not answer in time.
        EngineError: the engine is dead, or was built without `engine_args()`.
    """
    deadline = time.monotonic() + timeout_s
    if isinstance(engine, VllmServer):
        engine = engine.until(deadline)
        replicas = await call(engine, engine.replicas(), "answer", deadline)
    else:
        replicas = engine.vllm_config.parallel_config.data_parallel_size
    if replicas > 1:
        raise UnsupportedError(
            f"one engine with {replicas} replicas reports on the first of them only. "
            "Start one engine for each replica, and update each."
        )
    request = _init_request(plan, transport, first_reader)
    await drive(engine, attach_steps(request), "attach", deadline)


async def update(
    engine: Any, receipt: Receipt, *, in_flight: InFlight = "continue", timeout_s: float
) -> UpdateReport:
    """Load a published version into an engine that may be generating.

    The same as `update_all` with one engine. Calling it again after a failure is safe.

    Raises:
        CorruptionError: bytes are not what was sent. The old weights are served.
        TransferError: the version is gone, or loading failed. The old weights are served.
        DeadlineError: it took longer. If the workers may still be loading, the engine stays
            paused: update again.
        EngineError: the engine is dead, or its weights are torn: restart it.
    """
    return await update_all([engine], receipt, in_flight=in_flight, timeout_s=timeout_s)


async def update_all(
    engines: Sequence[Any],
    receipt: Receipt,
    *,
    in_flight: InFlight = "continue",
    timeout_s: float,
) -> UpdateReport:
    """Load a published version into all engines, or into none; each is called directly.

    All check every byte while they generate, and only then pause. Output tokens carry the version
    as the label `str(version)`. If one fails, those that loaded go back. An engine that hangs, or
    had no version to go back to, stays paused until an update succeeds, so two versions are never
    served side by side. Engines must not be reached through a router, which would pass each
    call on to one of them.

    Args:
        engines: each an `AsyncLLM` or a `VllmServer` that was attached.
        receipt: what `publish` returned.
        in_flight: requests under way keep the KV cache of the old weights ("continue"),
            recompute it with the new ones ("recompute"), or end with finish reason "abort".
            Under "continue" the prefix cache keeps old pages: use one `cache_salt` a version.
        timeout_s: for everything; the last two fifths are for going back and for resuming.

    Raises:
        UsageError: another `in_flight`; nothing was asked of an engine.
        PrimeblocksError: as `update`; `.engines` holds the positions of all engines that failed.
            Drop or restart the dead ones and call again.
    """
    if in_flight not in _PAUSE:
        raise UsageError(f"in_flight must be one of {list(_PAUSE)}; got {in_flight!r}")
    deadline = time.monotonic() + timeout_s
    fleet = [one.until(deadline) if isinstance(one, VllmServer) else one for one in engines]
    made = _make(receipt.version)
    return await update_fleet(fleet, made, pause=_PAUSE[in_flight], timeout_s=timeout_s)


def describe_llm(llm: Any, checkpoint: Manifest) -> list[Reads]:
    """Ask the workers of an offline `LLM`, as `describe` does. Blocks until they answer.

    Raises:
        EngineError: a worker failed.
    """
    return list(drive_sync(llm, _describe_steps(checkpoint)))


def attach_llm(llm: Any, plan: Plan, transport: Transport, *, first_reader: int = 0) -> None:
    """Attach an offline `LLM`, as `attach` does. Blocks until the engine answers.

    Raises:
        UnsupportedError: the workers cannot take updates safely.
        PlanError: the plan was made for other workers.
    """
    drive_sync(llm, attach_steps(_init_request(plan, transport, first_reader)))


def update_llm(llm: Any, receipt: Receipt, *, timeout_s: float) -> UpdateReport:
    """Update an offline `LLM`, between two calls of `generate`; clears its prefix cache.

    `timeout_s` bounds each worker's wait and check; the call returns when the engine answers.

    Raises:
        PrimeblocksError: as `update`.
    """
    start = time.monotonic()
    update_sync(llm, _make(receipt.version), deadline=start + timeout_s)
    llm.reset_prefix_cache()
    seconds = time.monotonic() - start
    return UpdateReport(receipt.version, seconds, seconds)


def _make(version: int) -> Update:
    return Update(version, uuid.uuid4().hex, lambda info: _Request(update_info=info))


def _init_request(plan: Plan, transport: Transport, first_reader: int) -> _Request:
    info = {"transport": transport.spec(), "plan": plan.to_json(), "first_reader": first_reader}
    return _Request(init_info=info)


def _describe_steps(checkpoint: Manifest) -> Steps:
    call = Step("collective_rpc", ("primeblocks_describe", None, (checkpoint.to_json(),)))
    answers = yield call
    for answer in answers:
        if answer["error"]:
            raise EngineError(f"a worker could not describe its loads: {answer['message']}")
    reads = [Reads.from_json(answer["reads"], checkpoint) for answer in answers]
    for rank, one in enumerate(reads):
        if one.inexact:
            name, why = next(iter(one.inexact.items()))
            logging.getLogger(__name__).warning(
                "worker %d will read more than it needs of %d tensors, such as %r: %s",
                rank,
                len(one.inexact),
                name,
                why,
            )
    return reads
