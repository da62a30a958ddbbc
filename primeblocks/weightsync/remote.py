"""Calls to an engine in another process: deadlines, death, and errors that keep their type."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable
from typing import Any

from .. import errors
from ..errors import DeadlineError, EngineError, PrimeblocksError, TransferError

__all__ = ["call", "tagged", "untagged"]

# Engines hand on the text of a worker's error, not its type.
_TAG = re.compile(r"\[primeblocks (\w+)\] (.*)", re.DOTALL)
_LOOK_S = 0.05


def tagged(error: PrimeblocksError) -> PrimeblocksError:
    """The same error with its type written into its text; raise this in a worker."""
    return type(error)(f"[primeblocks {type(error).__name__}] {error}")


def untagged(error: Exception) -> PrimeblocksError:
    """The typed error that a worker raised, from whatever became of it on the way.

    What never was one of ours is a TransferError.
    """
    found = _TAG.search(str(error))
    if found is None:
        return TransferError(f"{type(error).__name__}: {error}")
    kind = getattr(errors, found.group(1), TransferError)
    made: PrimeblocksError = kind(found.group(2))
    return made


async def call(engine: Any, answer: Awaitable[Any], what: str, deadline: float) -> Any:
    """Await an engine's answer until `deadline` (time.monotonic), or until the engine dies.

    Args:
        engine: has `errored`, true once it is dead.
        what: for messages: "the engine did not {what} in time".

    Raises:
        DeadlineError: no answer in time; the engine may still do it.
        EngineError: the engine died, before or while it was asked.
        PrimeblocksError: what the worker raised, typed again.
    """
    task = asyncio.ensure_future(answer)
    while not task.done():
        left = deadline - time.monotonic()
        await asyncio.wait({task}, timeout=max(0.0, min(left, _LOOK_S)))
        # Looked at here because a dead engine leaves its callers waiting.
        if not task.done() and (engine.errored or left <= 0):
            task.cancel()
            if engine.errored:
                raise EngineError(f"the engine died when asked to {what}. Restart it.")
            raise DeadlineError(f"the engine did not {what} in time")
    error = task.exception()
    if error is None:
        return task.result()
    if engine.errored:
        raise EngineError(f"the engine died when asked to {what}: {error}. Restart it.") from error
    raise untagged(error) if isinstance(error, Exception) else error
