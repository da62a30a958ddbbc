"""Calls of the client with typed errors, and parts of answers that both protocols share."""

import json
from collections.abc import Awaitable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openai import APIConnectionError, APIStatusError, APITimeoutError

from ....clock import Clock, MonotonicClock, within
from ....errors import CapacityError, DeadlineError, EngineError, PrimeblocksError, UsageError
from ....rollout import Rollout

__all__ = ["OTHER", "check_sampled", "choices_of", "rollout_of", "typed"]

# Errors of JSON that is not in the expected form.
OTHER = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
# vLLM sends it for minus infinity, and if it has no log-probability.
_NO_LOGPROB = -9999.0
# A log-softmax in float32 may round to a little above zero.
_MOST_LOGPROB = 1e-3


async def typed(awaitable: Awaitable[Any], what: str, timeout_s: float, clock: Clock | None) -> Any:
    """Await a call of the client until a deadline.

    Raises:
        DeadlineError: no answer in time.
        CapacityError: the server has no room now: status 408 or 429. A fleet keeps the engine.
        EngineError: the server died or failed.
        UsageError: the server refused the request.
    """
    clock = MonotonicClock() if clock is None else clock
    try:
        return await within(awaitable, timeout_s=timeout_s, clock=clock, what=what)
    except APITimeoutError as error:
        raise DeadlineError(f"{what} did not end within {timeout_s:g} s") from error
    except APIConnectionError as error:
        cause = error.__cause__ or error
        raise EngineError(f"{what} failed: {type(cause).__name__}: {cause}") from error
    except APIStatusError as error:
        kind: type[PrimeblocksError] = EngineError if error.status_code >= 500 else UsageError
        if error.status_code in (408, 429):
            kind = CapacityError
        raise kind(f"{what} got status {error.status_code}: {error.message[:1000]}") from error


def choices_of(text: str, what: str, n: int) -> list[dict[str, Any]]:
    """Return the `n` choices of an answer, in order.

    Raises:
        EngineError: the answer is not in this form.
        PrimeblocksError: a choice was aborted before its first token. The server is well.
    """
    try:
        choices = json.loads(text)["choices"]
        choices.sort(key=lambda choice: choice["index"])
        found = [choice["index"] for choice in choices]
        aborted = any(c.get("finish_reason") == "abort" and not c.get("token_ids") for c in choices)
    except OTHER as error:
        raise EngineError(f"{what} got no answer of this protocol: {text[:200]!r}") from error
    if found != list(range(n)):
        raise EngineError(f"{what} got choices {found} where {n} were asked for")
    if aborted:
        raise PrimeblocksError(f"{what} was aborted before its first token: ask again")
    return choices


def check_sampled(ids: Any, values: Any, what: str) -> None:
    """Check that `ids` are token ids and `values` has a log-probability for each.

    Raises:
        EngineError: they are not.
    """
    if not isinstance(ids, list) or not all(
        type(each) is int and 0 <= each < 2**63 for each in ids
    ):
        raise EngineError(f"{what} got token_ids that are none: {ids!r:.200}")
    if not ids or not isinstance(values, list) or len(values) != len(ids):
        raise EngineError(f"{what} got {len(ids)} tokens with log-probabilities {values!r:.200}")
    for at, value in enumerate(values):
        if type(value) not in (int, float) or not _NO_LOGPROB < value <= _MOST_LOGPROB:
            raise EngineError(f"{what} got {value!r:.200} as the log-probability of token {at}")


def rollout_of(
    choice: dict[str, Any],
    prompt: list[int],
    ids: list[int],
    logprobs: list[float],
    versions: NDArray[np.int64],
    *,
    what: str,
    prompt_id: Hashable,
) -> Rollout:
    """Return the rollout of a choice. Its expert routes, if any, become an attachment.

    Raises:
        EngineError: its finish reason or its routes are not text.
    """
    reason, routes = choice.get("finish_reason"), choice.get("routed_experts")
    if not isinstance(reason, str):
        raise EngineError(f"{what} got {reason!r:.200} as its finish_reason")
    if routes is not None and not isinstance(routes, str):
        raise EngineError(f"{what} got {routes!r:.200} as its routed_experts")
    return Rollout(
        tokens=np.array(prompt + ids),
        prompt_length=len(prompt),
        logprobs=np.array(logprobs, np.float64),
        versions=versions,
        finish_reason=reason,
        prompt_id=prompt_id,
        attachments={} if routes is None else {"routed_experts": routes},
    )
