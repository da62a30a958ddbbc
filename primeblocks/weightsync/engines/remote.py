"""The steps of an update on a remote engine, with deadlines and a check for a dead engine.

The steps come from a generator, so that synchronous and asynchronous engines share their order. A
step never raises in a worker. If it did, vLLM's executor would stop reading, and take the unread
answers as answers to its next call. So workers keep the outcome until the front end asks for it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Generator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from ... import errors
from ...errors import DeadlineError, EngineError, PrimeblocksError, TransferError
from ..held import left_s
from ..plan import Plan
from ..transports.transport import Transport, pauses

__all__ = [
    "STATE",
    "VERIFY",
    "EngineCall",
    "Steps",
    "Update",
    "WorkerState",
    "ask",
    "attach_steps",
    "call",
    "drive",
    "drive_sync",
]

STATE, VERIFY = "primeblocks_state", "primeblocks_verify"
_LOOK_S = 0.05
_BUSY_S = 1.0  # Each question to a server costs its process and ours milliseconds.


class EngineCall(NamedTuple):
    """A call of an engine's method with its arguments, made after `wait_s` seconds."""

    method: str
    args: tuple[Any, ...] = ()
    wait_s: float = 0.0


Steps = Generator[EngineCall, Any, Any]
_ASK = EngineCall("collective_rpc", (STATE,))


@dataclass(frozen=True)
class WorkerState:
    """The report of a worker: the version that it holds, and the outcome of its last call.

    `active` says that an update's session is open, `busy` that a check of bytes still runs. `error`
    is the name of an error's type.
    """

    version: int | None = None
    active: bool = False
    busy: bool = False
    error: str = ""
    message: str = ""
    value: Any = None

    def typed(self) -> PrimeblocksError:
        """Return the worker's error, with its type."""
        kind: type[PrimeblocksError] = getattr(errors, self.error, EngineError)
        return kind(self.message)


def ask(method: str, *arguments: Any) -> Steps:
    """Call a method of every worker, and return the value that each worker reports.

    Raises:
        PrimeblocksError: the error of the first worker that failed, with its type.
    """
    states = _states((yield EngineCall("collective_rpc", (method, None, arguments))))
    _raise_first(states)
    return [state.value for state in states]


def attach_steps(plan: Plan, transport: Transport, first_reader: int) -> Steps:
    """Open the transport in every worker.

    Raises:
        PrimeblocksError: the error of the first worker that failed, with its type.
    """
    info = {"transport": transport.spec(), "plan": plan.to_json(), "first_reader": first_reader}
    yield _ASK  # This also makes each worker look for its drafter.
    yield EngineCall("init_weight_transfer_engine", (SimpleNamespace(init_info=info),))
    _raise_first(_states((yield _ASK)))


@dataclass(frozen=True)
class Update:
    """One attempt to bring all workers of an engine to a version.

    Call `prepare`, `load`, then `commit` or `go_back`. A worker's error is raised with its type.

    Args:
        transaction: a unique name of this attempt. A worker ignores late calls of an attempt that
            was given up.
    """

    version: int
    transaction: str = field(default_factory=lambda: uuid.uuid4().hex)

    def prepare(self, deadline: float) -> Generator[EngineCall, Any, tuple[int | None, ...]]:
        """Check every byte while the engine generates, and return the version of each worker."""
        if any(state.active for state in _states((yield _ASK))):
            # An update whose caller ran into its deadline has left this session open.
            yield EngineCall("finish_weight_update")
        yield EngineCall("collective_rpc", (VERIFY, None, (self._info(self.version, deadline),)))
        states = _states((yield _ASK))
        # A worker gives up after 0.9 of the time. Ask it at least once in the rest.
        pause = pauses(0.005, longest_s=max(0.005, min(_BUSY_S, 0.05 * left_s(deadline))))
        while any(state.busy for state in states):
            states = _states((yield _ASK._replace(wait_s=next(pause))))
        _raise_first(states)
        return tuple(state.version for state in states)

    def load(self, deadline: float) -> Steps:
        """Load in every worker. `commit` then sets the label and ends the session."""
        yield EngineCall("start_weight_update")
        states = yield from self._receive(self.version, deadline)
        _raise_first(states)
        if any(state.version != self.version for state in states):
            raise TransferError(
                f"workers have the versions {[state.version for state in states]} after a call to "
                f"load version {self.version}, because another update came in between. Call "
                "update again."
            )

    def commit(self) -> Steps:
        """Label tokens with the new version from now on."""
        yield EngineCall("finish_weight_update", (str(self.version),))

    def go_back(
        self, before: tuple[int | None, ...], deadline: float
    ) -> Generator[EngineCall, Any, bool]:
        """Bring workers that loaded back to the previous version. Return whether that worked."""
        states = _states((yield _ASK))
        torn = [state for state in states if state.error == EngineError.__name__]
        _raise_first(torn)
        if any(state.version != old for state, old in zip(states, before, strict=True)):
            if before[0] is None or len(set(before)) > 1:
                return False
            states = yield from self._receive(before[0], deadline)
            _raise_first(states)
        if any(state.active for state in states):
            yield EngineCall("finish_weight_update")
        return True

    def _receive(
        self, version: int, deadline: float
    ) -> Generator[EngineCall, Any, list[WorkerState]]:
        request = SimpleNamespace(update_info=self._info(version, deadline))
        yield EngineCall("update_weights", (request,))
        return _states((yield _ASK))

    def _info(self, version: int, deadline: float) -> dict[str, Any]:
        # Less than the remaining time, so that a worker can still say what it waited for.
        left_s = 0.9 * max(0.0, deadline - time.monotonic())
        return {"version": version, "transaction": self.transaction, "timeout_s": left_s}


def _states(answers: list[dict[str, Any]]) -> list[WorkerState]:
    return [WorkerState(**answer) for answer in answers]


def _raise_first(states: list[WorkerState]) -> None:
    failed = [state for state in states if state.error]
    torn = [state for state in failed if state.error == EngineError.__name__]
    for state in torn + failed:
        raise state.typed()


def drive_sync(engine: Any, steps: Steps) -> Any:
    """Run the steps on an engine whose methods block. Returns and raises as the steps do."""
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as done:
            return done.value
        time.sleep(step.wait_s)
        answer = getattr(engine, step.method)(*step.args)


async def drive(engine: Any, steps: Steps, what: str, deadline: float) -> Any:
    """Run the steps on an asynchronous engine, as `drive_sync`. Raises also as `call` does."""
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as done:
            return done.value
        await asyncio.sleep(step.wait_s)
        answer = await call(engine, getattr(engine, step.method)(*step.args), what, deadline)


async def call(engine: Any, answer: Awaitable[Any], what: str, deadline: float) -> Any:
    """Await an engine's answer until `deadline` (time.monotonic), or until the engine dies.

    Args:
        engine: has `errored`, which is true after the engine died.
        what: a verb for messages, as in "the engine did not {what} in time."

    Raises:
        DeadlineError: the answer did not come in time. The engine may still do the work.
        EngineError: the engine died before or during the call, or refused the call.
    """
    task = asyncio.ensure_future(answer)
    try:
        while not task.done():
            left = deadline - time.monotonic()
            await asyncio.wait({task}, timeout=max(0.0, min(left, _LOOK_S)))
            # Checked here, because a dead engine leaves its callers waiting.
            if not task.done() and engine.errored:
                raise EngineError(f"the engine died before it could {what}. Restart the engine.")
            if not task.done() and left <= 0:
                raise DeadlineError(f"the engine did not {what} in time. Pass a longer timeout_s.")
    finally:
        task.cancel()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, DeadlineError):
        raise error
    if engine.errored:
        said = str(error).removesuffix(" Restart the server.")  # A server's error may end so.
        raise EngineError(
            f"the engine died before it could {what}: {said} Restart the engine."
        ) from error
    raise EngineError(f"the engine refused to {what}: {type(error).__name__}: {error}") from error
