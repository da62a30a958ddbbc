"""Driving the workers of an engine: what to call in which order, deadlines, and death.

The order is a generator of steps, so that synchronous and asynchronous engines share it. No step
fails in a worker: an executor that reads the answers of several workers stops at the first
failure and takes what the others said for answers to the next call. Workers say how it went when
they are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import errors
from ..errors import DeadlineError, EngineError, PrimeblocksError

__all__ = [
    "Step",
    "Steps",
    "WorkerState",
    "attach_steps",
    "call",
    "drive",
    "drive_sync",
    "update_steps",
]

_LOOK_S = 0.05


class Step(NamedTuple):
    """A method of the engine and its arguments."""

    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class WorkerState:
    """What a worker says about itself. `error` and `message` are of its last attach or update."""

    version: int | None = None
    active: bool = False
    error: str = ""
    message: str = ""

    def typed(self) -> PrimeblocksError:
        """The error that the worker met, as the type it had there."""
        kind: type[PrimeblocksError] = getattr(errors, self.error, EngineError)
        return kind(self.message)


Steps = Generator[Step, Any, None]


def attach_steps(ask: Step, request: Any) -> Steps:
    """Open the transport in every worker.

    Raises:
        PrimeblocksError: what the first worker met that could not.
    """
    yield Step("init_weight_transfer_engine", (request,))
    for state in _states((yield ask)):
        if state.error:
            raise state.typed()


def update_steps(ask: Step, version: int, request_of: Callable[[int], Any]) -> Steps:
    """Load `version` in every worker, or in none.

    Args:
        ask: the step that returns every worker's state, as dictionaries.
        request_of: version -> the argument of `update_weights`.

    Raises:
        PrimeblocksError: what the first worker met that failed; all serve the version before.
        EngineError: a worker is torn, or workers disagree for good.
    """
    states = _states((yield ask))
    if any(state.active for state in states):
        # Left over from an update whose caller ran into its deadline.
        yield Step("finish_weight_update")
    before = {state.version for state in states}
    states = yield from _round(ask, request_of(version))
    failed = [state for state in states if state.error]
    if not failed:
        yield Step("finish_weight_update", (str(version),))
        return
    yield Step("finish_weight_update")
    error = next((s for s in failed if s.error == EngineError.__name__), failed[0]).typed()
    if not isinstance(error, EngineError) and len(failed) < len(states):
        (old,) = before if len(before) == 1 else (None,)
        if old is None:
            raise EngineError(
                f"{len(failed)} of {len(states)} workers failed to load version {version}, and "
                f"they held {before}: no version to bring all back to. {error} Restart the engine."
            )
        states = yield from _round(ask, request_of(old))
        yield Step("finish_weight_update")
        if any(state.error for state in states):
            raise EngineError(f"{error} Going back to {old} failed too. Restart the engine.")
    raise error


def _round(ask: Step, request: Any) -> Generator[Step, Any, list[WorkerState]]:
    yield Step("start_weight_update")
    yield Step("update_weights", (request,))
    return _states((yield ask))


def _states(answers: list[dict[str, Any]]) -> list[WorkerState]:
    return [WorkerState(**answer) for answer in answers]


async def drive(engine: Any, steps: Steps, what: str, deadline: float) -> None:
    """Make the steps on an asynchronous engine. Raises as `call`, and what the steps raise."""
    answer = None
    with contextlib.suppress(StopIteration):
        while True:
            step = steps.send(answer)
            answer = await call(engine, getattr(engine, step.method)(*step.args), what, deadline)


def drive_sync(engine: Any, steps: Steps) -> None:
    """Make the steps on an engine whose methods block. Raises what the steps raise."""
    answer = None
    with contextlib.suppress(StopIteration):
        while True:
            step = steps.send(answer)
            answer = getattr(engine, step.method)(*step.args)


async def call(engine: Any, answer: Awaitable[Any], what: str, deadline: float) -> Any:
    """Await an engine's answer until `deadline` (time.monotonic), or until the engine dies.

    Args:
        engine: has `errored`, true once it is dead.
        what: for messages: "the engine did not {what} in time".

    Raises:
        DeadlineError: no answer in time; the engine may still do it.
        EngineError: the engine died, before or while it was asked, or it refused.
    """
    task = asyncio.ensure_future(answer)
    while not task.done():
        left = deadline - time.monotonic()
        await asyncio.wait({task}, timeout=max(0.0, min(left, _LOOK_S)))
        # Looked at here because a dead engine leaves its callers waiting.
        if not task.done() and (engine.errored or left <= 0):
            task.cancel()
            if engine.errored:
                raise EngineError(f"the engine died before it did {what}. Restart it.")
            raise DeadlineError(f"the engine did not {what} in time")
    error = task.exception()
    if error is None:
        return task.result()
    if engine.errored:
        raise EngineError(f"the engine died before it did {what}: {error} Restart it.") from error
    raise EngineError(f"the engine refused to {what}: {type(error).__name__}: {error}") from error
