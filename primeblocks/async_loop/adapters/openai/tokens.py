"""vLLM's own protocol. Each token names its weights, which may change during a request."""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from ....clock import Clock, MonotonicClock
from ....errors import EngineError, PrimeblocksError, ShapeError, UnsupportedError
from ....rollout import Rollout, version_of, versions_from_spans
from .exchange import OTHER, check_sampled, choices_of, rollout_of, typed

__all__ = ["generate_split", "generate_tokens"]

_PATH = "/inference/v1/generate"
_TRANSFER = "kv_transfer_params"


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
    """Sample `n` completions of one prompt by vLLM's server, or by servers behind a router.

    Expert routes become the attachment "routed_experts", in the form that the server sent.
    `replay.adapters.vllm.routes_from_base64` reads them.

    Args:
        client: its base URL may have any path below the server's address. A retry of the client
            samples anew, within `timeout_s`.
        sampling_params: more sampling parameters of vLLM. They override these arguments.
        extra_body: more fields of the request. They override these arguments.

    Raises:
        DeadlineError: no answer within `timeout_s`.
        CapacityError: the server has no room now.
        PrimeblocksError: the request was aborted before its first token, for instance by an update.
            It is not an EngineError, because the engine is well: a fleet keeps it, and `Retries`
            try again.
        EngineError: the server died or failed, or its answer is not in this form. Also raised if
            the label of its weights is not a version, because it was never given one.
        UnsupportedError: its answers have no log-probabilities, or no versions.
        UsageError: the server refused the request.
    """
    tokens = [int(token) for token in prompt]
    body = _request(
        tokens, cache_salt, extra_body, n=n, max_tokens=max_tokens, temperature=temperature,
        seed=seed, stop_token_ids=list(stop_token_ids), **(sampling_params or {}),
    )  # fmt: skip
    what = f"a completion of {len(tokens)} tokens by {client.base_url}"
    text = await _post(client, body, what, timeout_s, clock)
    choices = choices_of(text, what, body["sampling_params"].get("n", 1))
    return tuple(_rollout(choice, tokens, what, prompt_id) for choice in choices)


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
    """Let one server compute the prompt, and another continue from its keys and values.

    Returns the prompt with one token that the first server sampled, and the completion of the
    second server, which sampled that token anew. The second server gets one request for one
    completion, because pages are read only once. Each result has the routes that its server
    computed. `replay.adapters.vllm.join_prefill` joins them into the routes of one engine. A router
    of such servers returns only the second result.

    Args:
        options: of `generate_tokens`, except `n`.

    Raises:
        UnsupportedError: the first server has no connector for transfers.
        DeadlineError: not both ended within `timeout_s`. The first server keeps the pages for a
            while.
        EngineError: as for `generate_tokens`. It names both servers if the second failed, because
            the second may have failed to read the pages of the first.
        PrimeblocksError: as for `generate_tokens`. Also raised if the weights changed between the
            prompt and the completion.
    """
    tokens, extra = [int(token) for token in prompt], dict(extra_body or {})
    clock = MonotonicClock() if clock is None else clock
    end = clock.now() + timeout_s
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    body = _request(tokens, cache_salt, extra | {_TRANSFER: wanted}, n=1, max_tokens=1)
    what = f"a prompt of {len(tokens)} tokens by {prefill.base_url}"
    text = await _post(prefill, body, what, timeout_s, clock)
    (choice,) = choices_of(text, what, 1)
    transfer = json.loads(text).get(_TRANSFER)
    if not isinstance(transfer, dict):
        raise UnsupportedError(
            f"{what} came without {_TRANSFER}: start both servers with --kv-transfer-config, such "
            'as \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\'.'
        )
    computed = _rollout(choice, tokens, what, options.get("prompt_id"))
    try:
        (completion,) = await generate_tokens(
            decode.with_options(max_retries=0),
            tokens,
            timeout_s=end - clock.now(),
            cache_salt=cache_salt,
            extra_body=extra | {_TRANSFER: transfer},
            clock=clock,
            n=1,
            **options,
        )
    except EngineError as error:
        error.add_note(f"It was to read the prompt's pages from {prefill.base_url}.")
        raise
    if (before := computed.versions[0]) != (after := completion.versions[0]):
        raise PrimeblocksError(
            f"{what}: version {before} computed it, and version {after} went on. Ask again."
        )
    return computed, completion


def _request(
    tokens: list[int],
    cache_salt: str | None,
    extra_body: Mapping[str, Any] | None,
    **sampling_params: Any,
) -> dict[str, Any]:
    return {
        "token_ids": tokens,
        "sampling_params": {"logprobs": 0, "detokenize": False} | sampling_params,
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
        **(extra_body or {}),
    }


async def _post(
    client: AsyncOpenAI, body: dict[str, Any], what: str, timeout_s: float, clock: Clock | None
) -> str:
    url = str(client.base_url.join(_PATH))
    asked = client.post(url, cast_to=str, body=body, options={"timeout": timeout_s})
    text: str = await typed(asked, what, timeout_s, clock)
    return text


def _rollout(choice: dict[str, Any], prompt: list[int], what: str, prompt_id: Hashable) -> Rollout:
    ids, told, spans = (choice.get(name) for name in ("token_ids", "logprobs", "weight_versions"))
    if not told:
        raise UnsupportedError(f"{what} got no log-probabilities, though it asked for them.")
    if not spans:
        raise UnsupportedError(f"{what} got no weight_versions: needs vLLM 0.32 or later.")
    try:
        content = told["content"]
        named, logprobs = ([each[key] for each in content] for key in ("token_id", "logprob"))
        labels = [(each["version"], each["start"], each["end"]) for each in spans]
    except OTHER as error:
        raise EngineError(f"{what} got no choice of this protocol: {choice!r:.200}") from error
    check_sampled(ids, logprobs, what)
    if named != ids:
        raise EngineError(f"{what} got log-probabilities of {named!r:.200} for {ids!r:.200}")
    try:
        versions = versions_from_spans([_span(each, what) for each in labels], length=len(ids))
    except ShapeError as error:
        raise EngineError(f"{what} got versions that do not fit: {error}") from error
    return rollout_of(choice, prompt, ids, logprobs, versions, what=what, prompt_id=prompt_id)


def _span(label: tuple[Any, Any, Any], what: str) -> tuple[int, int, int]:
    named, start, end = label
    if (version := version_of(named)) is None:
        raise EngineError(
            f"{what}: its weights are labelled {named!r:.200}; versions here are integers. It has "
            "not been given a version since it started: update it before it gets requests."
        )
    if type(start) is not int or type(end) is not int:
        raise EngineError(f"{what} got versions of tokens {start!r} to {end!r}")
    return version, start, end
