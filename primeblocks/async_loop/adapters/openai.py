"""Engines behind HTTP servers, called with token ids through the `openai` client.

Rollouts keep expert routes as the server sent them, in the attachment "routed_experts".
`replay.adapters.vllm.routes_from_base64` decodes vLLM's routes.

`generate` uses the OpenAI protocol. The server must support `return_token_ids`, as vLLM 0.32
(tested) and newer SGLang (not tested) do. `generate_tokens` uses vLLM's own protocol (with
`--enable-scale-out`), which labels each token with the version of the weights.

Start vLLM with `--logprobs-mode processed_logprobs`. Without this option, vLLM's log-probabilities
ignore the temperature and other sampling parameters.
"""

import json
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clock import Clock, MonotonicClock, within
from ...errors import (
    CapacityError,
    DeadlineError,
    EngineError,
    PrimeblocksError,
    ShapeError,
    UnsupportedError,
    UsageError,
    check_version,
    lacks_files,
    needs,
)
from ...rollout import Rollout, version_of, versions_from_spans

with needs("openai", extra="openai"):
    from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI

__all__ = ["generate", "generate_split", "generate_tokens", "served_version"]

_TRANSFER = "kv_transfer_params"
# Errors of JSON that is not in the expected form.
_OTHER = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_NO_LOGPROB = -9999.0  # vLLM sends this for minus infinity, or for a missing value.
_MOST_LOGPROB = 2**-10  # As for a Rollout: a log-softmax in float32 may round up.


async def generate(
    client: AsyncOpenAI,
    prompt: Sequence[int],
    *,
    model: str,
    version: int | Callable[[], Awaitable[int]],
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

    Args:
        client: a client that may retry within `timeout_s`.
        version: the version of the weights. If weights can change during the call, pass an async
            function that returns the server's version (`served_version` for vLLM). The function
            runs before and after the request, because the OpenAI protocol lacks versions of tokens.
        extra_body: more fields of the request, which override arguments of this function. Without
            them, top-k, top-p, min-p and penalties are off, whatever the checkpoint's defaults are.

    Raises:
        DeadlineError: no answer within `timeout_s`.
        CapacityError: the server has no room for the request now, or this process for a connection.
        EngineError: the server died, or its answer does not have the expected form.
        PrimeblocksError: the weights changed during the call, or the server aborted the request or
            failed in it (status 500). `Retries` repeat the request. A `Fleet` keeps the server.
        UnsupportedError: the server's answers have no log-probabilities or no token ids.
        UsageError: the server refused the request.
    """
    tokens = [int(token) for token in prompt]
    body = {
        **{"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True},
        "return_tokens_as_token_ids": True,  # Each log-probability names its token.
        "stop_token_ids": list(stop_token_ids),
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
        **(extra_body or {}),
    }

    async def ask() -> int:
        return check_version(await version() if callable(version) else version)

    async def exchange() -> tuple[int, str, int]:
        before = await ask()
        raw = await client.completions.with_raw_response.create(
            model=model, prompt=tokens, max_tokens=max_tokens, n=n, temperature=temperature,
            top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0, logprobs=0, seed=seed,
            extra_body=body, timeout=timeout_s,
        )  # fmt: skip
        return before, raw.text, await ask()

    what = f"a completion of {len(tokens)} tokens by {client.base_url}"
    before, text, after = await _typed(exchange(), what, timeout_s, clock)
    if before != after:
        raise PrimeblocksError(
            f"the weights went from version {before} to {after} during {what}, and the server "
            "does not say at which token. Ask for fewer tokens, or pause requests during updates."
        )
    choices = _choices_of(text, what, body.get("n", n))
    return tuple(_rollout(choice, tokens, before, what, prompt_id) for choice in choices)


async def served_version(
    client: AsyncOpenAI, *, timeout_s: float = 60.0, clock: Clock | None = None
) -> int:
    """Ask vLLM's server (with VLLM_SERVER_DEV_MODE=1) for the version of its weights.

    Raises:
        DeadlineError, CapacityError: as for `generate`.
        EngineError: as for `generate`, or the label of the server's weights is not a version.
        UsageError: the server lacks `/weight_info`.
    """
    what = f"the version of the weights of {client.base_url}"
    url = str(client.base_url.join("/weight_info"))
    asked = client.get(url, cast_to=str, options={"timeout": timeout_s})
    text = await _typed(asked, what, timeout_s, clock)
    try:
        label = json.loads(text)["weight_version"]
    except _OTHER as error:
        raise EngineError(f"{what}: the server answered {text[:200]!r}") from error
    if (found := version_of(label)) is None:
        raise EngineError(
            f"{what} is {label!r:.200}, but a policy version must be an integer. After an update, "
            "post str(version) to /update_weight_version."
        )
    return found


def _rollout(
    choice: dict[str, Any], prompt: list[int], version: int, what: str, prompt_id: Hashable
) -> Rollout:
    ids, told = choice.get("token_ids"), choice.get("logprobs")
    told = told if isinstance(told, dict) else {}
    values, names = told.get("token_logprobs"), told.get("tokens")
    if ids is None:
        raise UnsupportedError(
            f"{what} got no token_ids: the server does not know return_token_ids. Text cannot be "
            "made into the tokens that were sampled. Use a server that returns them, such as vLLM."
        )
    if values is None:
        raise UnsupportedError(f"{what} got no log-probabilities, though it asked for them.")
    _check_sampled(ids, values, what)
    named = [str(name) for name in names] if isinstance(names, list) else []
    by_id = any(name.startswith("token_id:") for name in named)
    if by_id and named != [f"token_id:{token}" for token in ids]:
        raise EngineError(f"{what} got log-probabilities of {named!r:.200} for {ids!r:.200}")
    if (run := choice.get("prompt_token_ids")) is None:
        raise UnsupportedError(
            f"{what} got no prompt_token_ids, so the prompt that the server ran is unknown. Use a "
            "server that returns them with return_token_ids, such as vLLM."
        )
    if run != prompt:
        raise EngineError(f"{what} got back a prompt other than the one it sent: {run!r:.200}")
    versions = np.full(len(ids), version)
    return _rollout_of(choice, prompt, ids, values, versions, what=what, prompt_id=prompt_id)


async def generate_tokens(
    client: AsyncOpenAI,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    timeout_s: float,
    n: int = 1,
    temperature: float = 1.0,
    stop_token_ids: Sequence[int] = (),
    cache_salt: str | None = None,
    seed: int | None = None,
    prompt_id: Hashable = None,
    sampling_params: Mapping[str, Any] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> tuple[Rollout, ...]:
    """Sample `n` completions of one prompt on vLLM's server, or on servers behind a router.

    Args:
        client: a client of the server. The path of the client's base URL is ignored.
        sampling_params: vLLM's sampling parameters, which override arguments of this function.
        extra_body: more fields of the request, which override arguments of this function.

    Raises:
        EngineError: as for `generate`, or the label of the server's weights is not a version.
        UnsupportedError: the server's answers have no log-probabilities, or no versions.
        DeadlineError, CapacityError, PrimeblocksError, UsageError: as for `generate`.
    """
    tokens = [int(token) for token in prompt]
    sampling = {
        "n": n,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop_token_ids": list(stop_token_ids),
        **(sampling_params or {}),
    }
    what = f"a completion of {len(tokens)} tokens by {client.base_url}"
    text = await _post(client, tokens, cache_salt, extra_body, sampling, what, timeout_s, clock)
    sent = (extra_body or {}).get("sampling_params", sampling)
    choices = _choices_of(text, what, sent.get("n", 1))
    return tuple(_labelled_rollout(choice, tokens, what, prompt_id) for choice in choices)


async def generate_split(
    prefill: AsyncOpenAI,
    decode: AsyncOpenAI,
    prompt: Sequence[int],
    *,
    timeout_s: float,
    cache_salt: str | None = None,
    extra_body: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    **options: Any,
) -> tuple[Rollout, Rollout]:
    """Prefill a prompt on one server, and decode from its keys and values on another server.

    Returns a rollout with one token from the prefill server, and a rollout with the whole
    completion from the decode server. The decode server samples the first token again. Each rollout
    has the routes that its own server computed. `replay.adapters.vllm.join_prefill` joins them.

    Args:
        options: more arguments of `generate_tokens`, except `n`.

    Raises:
        UnsupportedError: the prefill server has no connector for KV transfers.
        DeadlineError: the requests to the two servers together took longer than `timeout_s`.
        EngineError: as for `generate_tokens`.
        PrimeblocksError: as for `generate_tokens`, or the servers had different weight versions. If
            `decode` failed, the error shows both URLs.
    """
    tokens, extra = [int(token) for token in prompt], dict(extra_body or {})
    clock = MonotonicClock() if clock is None else clock
    end = clock.now() + timeout_s
    what, one = f"a prompt of {len(tokens)} tokens by {prefill.base_url}", {"n": 1, "max_tokens": 1}
    asked = extra | {_TRANSFER: {"do_remote_decode": True, "do_remote_prefill": False}}
    text = await _post(prefill, tokens, cache_salt, asked, one, what, timeout_s, clock)
    (choice,) = _choices_of(text, what, 1)
    if not isinstance(transfer := json.loads(text).get(_TRANSFER), dict):
        raise UnsupportedError(
            f"{what} came without {_TRANSFER}. Start both servers with --kv-transfer-config, such "
            'as \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\'.'
        )
    computed = _labelled_rollout(choice, tokens, what, options.get("prompt_id"))
    try:
        (completion,) = await generate_tokens(
            decode.with_options(max_retries=0),  # A retry would find no pages: they are read once.
            tokens,
            timeout_s=end - clock.now(),
            cache_salt=cache_salt,
            extra_body=extra | {_TRANSFER: transfer},
            clock=clock,
            n=1,
            **options,
        )
    except PrimeblocksError as error:
        error.add_note(f"This server had to read the prompt's pages from {prefill.base_url}.")
        raise
    if (before := computed.versions[0]) != (after := completion.versions[0]):
        raise PrimeblocksError(
            f"{what}: version {before} computed it, and version {after} continued. Send it again."
        )
    return computed, completion


async def _post(
    client: AsyncOpenAI,
    tokens: list[int],
    cache_salt: str | None,
    extra_body: Mapping[str, Any] | None,
    sampling: dict[str, Any],
    what: str,
    timeout_s: float,
    clock: Clock | None,
) -> str:
    body = {
        "token_ids": tokens,
        "sampling_params": {"logprobs": 0, "detokenize": False} | sampling,
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
        **(extra_body or {}),
    }
    url = str(client.base_url.join("/inference/v1/generate"))
    asked = client.post(url, cast_to=str, body=body, options={"timeout": timeout_s})
    return await _typed(asked, what, timeout_s, clock)


def _labelled_rollout(
    choice: dict[str, Any], prompt: list[int], what: str, prompt_id: Hashable
) -> Rollout:
    ids, told, spans = (choice.get(name) for name in ("token_ids", "logprobs", "weight_versions"))
    if not told:
        raise UnsupportedError(f"{what} got no log-probabilities, though it asked for them.")
    if not spans:
        raise UnsupportedError(f"{what} got no weight_versions. Use vLLM 0.32 or later.")
    try:
        content = told["content"]
        named, logprobs = ([each[key] for each in content] for key in ("token_id", "logprob"))
        labels = [(each["version"], each["start"], each["end"]) for each in spans]
    except _OTHER as error:
        raise EngineError(f"{what} got a malformed choice: {choice!r:.200}") from error
    _check_sampled(ids, logprobs, what)
    if named != ids:
        raise EngineError(f"{what} got log-probabilities of {named!r:.200} for {ids!r:.200}")
    found = []
    for label, start, end in labels:
        if (version := version_of(label)) is None:
            raise EngineError(
                f"{what} has weights with the label {label!r:.200}, which is not a policy version. "
                "Update the weights of a server before you send requests."
            )
        if type(start) is not int or type(end) is not int:
            raise EngineError(f"{what} got a version of tokens {start!r} to {end!r}")
        found.append((version, start, end))
    try:
        versions = versions_from_spans(found, length=len(ids))
    except ShapeError as error:
        raise EngineError(f"{what} got versions that do not fit the tokens: {error}") from error
    return _rollout_of(choice, prompt, ids, logprobs, versions, what=what, prompt_id=prompt_id)


async def _typed(
    awaitable: Awaitable[Any], what: str, timeout_s: float, clock: Clock | None
) -> Any:
    clock = MonotonicClock() if clock is None else clock
    try:
        return await within(awaitable, timeout_s=timeout_s, clock=clock, what=what)
    except APITimeoutError as error:
        raise DeadlineError(f"{what} did not end within {timeout_s:g} s") from error
    except APIConnectionError as error:
        if lacks_files(error):
            raise CapacityError(f"{what} failed: too many open files; see ulimit -n") from error
        cause = error.__cause__ or error
        raise EngineError(f"{what} failed: {type(cause).__name__}: {cause}") from error
    except APIStatusError as error:
        code = error.status_code
        kind: type[PrimeblocksError] = EngineError if code >= 500 else UsageError
        # The server is well, but has no room now, or failed in this request. A fleet keeps it.
        well = dict.fromkeys((408, 429, 503), CapacityError) | {500: PrimeblocksError}
        kind = kind if "EngineCore encountered" in error.message else well.get(code, kind)
        raise kind(f"{what} got status {code}: {error.message[:1000]}") from error


def _choices_of(text: str, what: str, n: int) -> list[dict[str, Any]]:
    try:
        choices = sorted(json.loads(text)["choices"], key=lambda choice: choice["index"])
        found = [choice["index"] for choice in choices]
        aborted = any(choice.get("finish_reason") in ("abort", "error") for choice in choices)
    except _OTHER as error:
        raise EngineError(f"{what} got a malformed answer: {text[:200]!r}") from error
    if found != list(range(n)):
        raise EngineError(f"{what} asked for {n} choices, but got the indices {found}")
    if aborted:
        raise PrimeblocksError(f"{what} was aborted before its end. Send the request again.")
    return choices


def _check_sampled(ids: Any, values: Any, what: str) -> None:
    if not isinstance(ids, list) or any(type(x) is not int or not 0 <= x < 2**63 for x in ids):
        raise EngineError(f"{what} got token_ids that are not token ids: {ids!r:.200}")
    if not ids or not isinstance(values, list) or len(values) != len(ids):
        raise EngineError(f"{what} got {len(ids)} tokens with log-probabilities {values!r:.200}")
    for at, value in enumerate(values):
        if type(value) not in (int, float) or not _NO_LOGPROB < value <= _MOST_LOGPROB:
            raise EngineError(f"{what} got {value!r:.200} as the log-probability of token {at}")


def _rollout_of(
    choice: dict[str, Any],
    prompt: list[int],
    ids: list[int],
    logprobs: list[float],
    versions: NDArray[np.int64],
    *,
    what: str,
    prompt_id: Hashable,
) -> Rollout:
    reason, routes = choice.get("finish_reason"), choice.get("routed_experts")
    if not isinstance(reason, str):
        raise EngineError(f"{what} got {reason!r:.200} as its finish_reason; expected text")
    if routes is not None and not isinstance(routes, str):
        raise EngineError(f"{what} got {routes!r:.200} as its routed_experts; expected base64 text")
    return Rollout(
        tokens=np.array(prompt + ids),
        prompt_length=len(prompt),
        logprobs=np.array(logprobs, np.float64),
        versions=versions,
        finish_reason=reason,
        prompt_id=prompt_id,
        attachments={} if routes is None else {"routed_experts": routes},
    )
