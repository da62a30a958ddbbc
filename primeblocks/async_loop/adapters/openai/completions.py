"""The OpenAI protocol, with token ids in and out."""

import json
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from ....clock import Clock
from ....errors import (
    EngineError,
    PrimeblocksError,
    UnsupportedError,
    UsageError,
    check_version,
)
from ....rollout import Rollout, version_of
from .exchange import OTHER, check_sampled, choices_of, rollout_of, typed

__all__ = ["generate", "served_version"]

Version = int | Callable[[], Awaitable[int]]


async def generate(
    client: AsyncOpenAI,
    prompt: Sequence[int],
    *,
    model: str,
    version: Version,
    max_tokens: int,
    timeout_s: float,
    n: int = 1,
    temperature: float = 1.0,
    stop_token_ids: Sequence[int] = (),
    cache_salt: str | None = None,
    seed: int | None = None,
    prompt_id: Hashable = None,
    extra_body: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> tuple[Rollout, ...]:
    """Sample `n` completions of one prompt. Makes one request, or three if `version` is a function.

    Expert routes become the attachment "routed_experts", in the form that the server sent.
    `replay.adapters.vllm.routes_from_base64` reads vLLM's text.

    Args:
        client: it may retry, within `timeout_s`.
        version: of the weights, if they cannot change during the call. Otherwise a function that
            asks the server before and after, because this protocol does not label tokens with
            versions. For vLLM use `served_version`.
        extra_body: more fields of the request. They override these arguments.

    Raises:
        DeadlineError: no answer within `timeout_s`.
        CapacityError: the server has no room now.
        EngineError: the server died or failed, or its answer is not in this form or is for another
            prompt.
        PrimeblocksError: the weights changed during the call, or the request was aborted before its
            first token, for instance by an update. It is not an EngineError, because the engine is
            well: a fleet keeps it, and `Retries` try again.
        UnsupportedError: its answers have no log-probabilities, or no token ids of prompt or
            completion.
        UsageError: the server refused the request.
    """
    tokens = [int(token) for token in prompt]
    body = {
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # Each log-probability names the token that it is of.
        "stop_token_ids": list(stop_token_ids),
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
        **(extra_body or {}),
    }

    async def exchange() -> tuple[int, str, int]:
        before = await _ask(version)
        raw = await client.completions.with_raw_response.create(
            model=model, prompt=tokens, max_tokens=max_tokens, n=n, temperature=temperature,
            logprobs=0, seed=seed, extra_body=body, timeout=timeout_s,
        )  # fmt: skip
        return before, raw.text, await _ask(version)

    what = f"a completion of {len(tokens)} tokens by {client.base_url}"
    before, text, after = await typed(exchange(), what, timeout_s, clock)
    if before != after:
        raise PrimeblocksError(
            f"the weights went from version {before} to {after} during {what}, and the server does "
            "not say at which token. Ask again, for fewer tokens, or hold requests during updates."
        )
    choices = choices_of(text, what, n)
    return tuple(_rollout(choice, tokens, before, what, prompt_id) for choice in choices)


async def served_version(
    client: AsyncOpenAI, *, timeout_s: float = 10.0, clock: Clock | None = None
) -> int:
    """Ask vLLM's server for its weights' version: `/weight_info`, of VLLM_SERVER_DEV_MODE=1.

    Raises:
        DeadlineError, CapacityError, EngineError: as for `generate`.
        UsageError: the server does not have this path, or the label of its weights is not a
            version.
    """
    what = f"the version of the weights of {client.base_url}"
    url = str(client.base_url.join("/weight_info"))
    asked = client.get(url, cast_to=str, options={"timeout": timeout_s})
    text = await typed(asked, what, timeout_s, clock)
    try:
        label = json.loads(text)["weight_version"]
    except OTHER as error:
        raise EngineError(f"{what}: the server answered {text[:200]!r}") from error
    if (found := version_of(label)) is None:
        raise UsageError(
            f"{what} is {label!r:.200}; versions here are integers. Label them when they are "
            "updated: /update_weight_version with str(version)."
        )
    return found


async def _ask(version: Version) -> int:
    return check_version(await version() if callable(version) else version)


def _rollout(
    choice: dict[str, Any], prompt: list[int], version: int, what: str, prompt_id: Hashable
) -> Rollout:
    ids, logprobs = _sampled(choice, what)
    if (run := choice.get("prompt_token_ids")) is None:
        raise UnsupportedError(
            f"{what} got no prompt_token_ids, so the prompt that the server ran is unknown. Use a "
            "server that returns them with return_token_ids, such as vLLM."
        )
    if run != prompt:
        raise EngineError(f"{what}: the server ran another prompt: {run!r:.200}")
    versions = np.full(len(ids), version)
    return rollout_of(choice, prompt, ids, logprobs, versions, what=what, prompt_id=prompt_id)


def _sampled(choice: dict[str, Any], what: str) -> tuple[list[int], list[float]]:
    """Token ids and their log-probabilities, of which the server says that they belong together."""
    ids, told = choice.get("token_ids"), choice.get("logprobs")
    values, names = (
        (told.get("token_logprobs"), told.get("tokens")) if isinstance(told, dict) else (None, None)
    )
    if ids is None:
        raise UnsupportedError(
            f"{what} got no token_ids: the server does not know return_token_ids. Text cannot be "
            "made into the tokens that were sampled. Use a server that returns them, such as vLLM."
        )
    if values is None:
        raise UnsupportedError(f"{what} got no log-probabilities, though it asked for them.")
    check_sampled(ids, values, what)
    named = [str(name) for name in names] if isinstance(names, list) else []
    by_id = any(name.startswith("token_id:") for name in named)
    if by_id and named != [f"token_id:{token}" for token in ids]:
        raise EngineError(f"{what} got log-probabilities of {named!r:.200} for {ids!r:.200}")
    return ids, values
