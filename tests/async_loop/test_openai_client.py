"""The adapter of the `openai` client, against a server of known behaviour.

With vLLM's own server: tests/replay/test_vllm_server.py.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

openai = pytest.importorskip("openai")

from primeblocks.async_loop.adapters.openai import (  # noqa: E402
    generate,
    generate_split,
    generate_tokens,
    served_version,
)
from primeblocks.errors import (  # noqa: E402
    DeadlineError,
    EngineError,
    PrimeblocksError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing.faults import ManualClock  # noqa: E402

PROMPT = [7, 8, 9]
Reply = Callable[[str, Any], Any]


class Died(Exception):
    """The connection ends without an answer."""


def choice(index: int = 0, **other: Any) -> dict[str, Any]:
    """One choice in the words of vLLM."""
    ids = [20 + index, 21]
    names = [f"token_id:{each}" for each in ids]
    return {
        "index": index,
        "text": "",
        "finish_reason": "stop",
        "prompt_token_ids": PROMPT,
        "token_ids": ids,
        "logprobs": {"tokens": names, "token_logprobs": [-0.1 - index, -1 / 3]},
    } | other


def logprobs(*values: Any, names: Any = None) -> dict[str, Any]:
    return choice(logprobs={"tokens": names, "token_logprobs": list(values)})


async def on_server(reply: Reply, use: Callable[[Any], Awaitable[Any]]) -> Any:
    """Use a client of a server that answers `reply(path, body)`: JSON, text, or status and JSON."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = (
                int(head.split("content-length: ")[1].split()[0]) if "content-length" in head else 0
            )
            body = await reader.readexactly(size)
            answer = reply(head.split()[1], json.loads(body or b"null"))
            if asyncio.iscoroutine(answer):
                answer = await answer
            status, answer = answer if isinstance(answer, tuple) else (200, answer)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%s" % (status, len(data), data)
            )
            await writer.drain()
        except Died:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        return await use(client)


def ask(reply: Reply, **other: Any) -> Any:
    arguments = {"model": "m", "version": 4, "max_tokens": 8, "timeout_s": 60.0} | other
    return asyncio.run(on_server(reply, lambda client: generate(client, PROMPT, **arguments)))


def test_rollouts_are_what_the_server_said():
    asked = []

    def reply(path: str, body: Any) -> Any:
        asked.append((path, body))
        return {"choices": [choice(1, routed_experts="text"), choice(0)]}

    first, second = ask(reply, n=2, seed=3, cache_salt="v4", stop_token_ids=[21], prompt_id="p")
    ((path, body),) = asked
    assert path == "/v1/completions"
    wanted = {"prompt": PROMPT, "n": 2, "seed": 3, "cache_salt": "v4", "stop_token_ids": [21]}
    assert wanted.items() <= body.items()
    assert first.tokens.tolist() == [*PROMPT, 20, 21]
    assert second.tokens.tolist() == [*PROMPT, 21, 21]
    assert first.prompt_length == 3
    # Every digit of what the server sent.
    np.testing.assert_array_equal(second.logprobs, [-1.1, -1 / 3])
    np.testing.assert_array_equal(first.versions, [4, 4])
    assert (first.finish_reason, first.prompt_id) == ("stop", "p")
    assert (dict(first.attachments), dict(second.attachments)) == ({}, {"routed_experts": "text"})


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        ("<html>", EngineError, "no answer of this protocol"),
        pytest.param("[" * 100_000, EngineError, "no answer of this protocol", id="deep"),
        ({"choices": None}, EngineError, "no answer of this protocol"),
        ({"choices": [{}]}, EngineError, "no answer of this protocol"),
        ({"choices": []}, EngineError, r"choices \[\] where 1"),
        ({"choices": [choice(), choice()]}, EngineError, r"choices \[0, 0\]"),
        ({"choices": [choice(token_ids=None)]}, UnsupportedError, "return_token_ids"),
        ({"choices": [choice(token_ids=[])]}, EngineError, "0 tokens"),
        ({"choices": [choice(token_ids=[20])]}, EngineError, "1 tokens"),
        ({"choices": [choice(token_ids=[20, -1])]}, EngineError, "that are none"),
        ({"choices": [choice(token_ids=[20, True])]}, EngineError, "that are none"),
        ({"choices": [choice(token_ids=[20, 1 << 70])]}, EngineError, "that are none"),
        ({"choices": [choice(token_ids=[21, 20])]}, EngineError, "log-probabilities of"),
        ({"choices": [choice(prompt_token_ids=[1, *PROMPT])]}, EngineError, "another prompt"),
        ({"choices": [choice(logprobs=None)]}, UnsupportedError, "no log-probabilities"),
        ({"choices": [choice(logprobs=[])]}, UnsupportedError, "no log-probabilities"),
        ({"choices": [logprobs(-1.0)]}, EngineError, "2 tokens"),
        ({"choices": [logprobs(-1.0, None)]}, EngineError, "None as the .* of token 1"),
        ({"choices": [logprobs(float("nan"), -1.0)]}, EngineError, "nan as the .* of token 0"),
        ({"choices": [logprobs(-1.0, -9999.0)]}, EngineError, "-9999.0 as the"),
        ((400, {"message": "too long"}), UsageError, "status 400.*too long"),
        ((429, {}), EngineError, "status 429"),
        ((500, {"message": "boom"}), EngineError, "status 500.*boom"),
    ],
)
def test_any_other_answer_is_a_typed_error(answer, error, match):
    with pytest.raises(PrimeblocksError, match=match) as caught:
        ask(lambda *_: answer)
    assert type(caught.value) is error


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
PLACES = ["index", "token_ids", "prompt_token_ids", "logprobs", "finish_reason", "routed_experts"]


@given(
    st.sampled_from([(), *((name,) for name in PLACES), ("token_ids", 0)])
    | st.tuples(st.just("logprobs"), st.sampled_from(["tokens", "token_logprobs"]))
    | st.tuples(st.just("logprobs"), st.sampled_from(["tokens", "token_logprobs"]), st.just(1)),
    ANYTHING,
)
def test_anything_in_the_place_of_a_part_is_an_answer_or_a_typed_error(place, value):
    answer: Any = {"choices": [choice()]}
    held, key = answer["choices"], 0
    for name in place:
        held, key = held[key], name
    held[key] = value
    try:
        (rollout,) = ask(lambda *_: answer)
    except PrimeblocksError:
        return
    assert rollout.tokens.tolist() == PROMPT + answer["choices"][0]["token_ids"]


def test_log_probabilities_without_ids_are_taken_by_their_place():
    for names in (None, ["a", "b"]):
        (rollout,) = ask(lambda *_, names=names: {"choices": [logprobs(-1.0, -2, names=names)]})
        assert rollout.logprobs.tolist() == [-1.0, -2.0]


def test_the_end_of_the_server_is_an_engine_error():
    def die(*_: Any) -> None:
        raise Died

    with pytest.raises(EngineError, match="a completion of 3 tokens by http://127.0.0.1"):
        ask(die)


def test_a_deadline_lets_the_request_go():
    arrived, never = asyncio.Event(), asyncio.Event()

    async def hang(*_: Any) -> Any:
        arrived.set()
        await never.wait()
        raise Died

    async def use(client: Any) -> None:
        clock = ManualClock()
        asked = asyncio.ensure_future(
            generate(client, PROMPT, model="m", version=0, max_tokens=1, timeout_s=5.0, clock=clock)
        )
        await arrived.wait()
        clock.advance(5.0)
        with pytest.raises(DeadlineError, match="within 5 s"):
            await asked
        never.set()

    asyncio.run(on_server(hang, use))


def test_weights_that_change_meanwhile_are_refused():
    now = {"weight_version": "3"}

    def reply(path: str, _: Any) -> Any:
        return dict(now) if path == "/weight_info" else {"choices": [choice()]}

    def update(path: str, body: Any) -> Any:
        answer = reply(path, body)
        now["weight_version"] = "4"
        return answer

    def rollouts(server: Reply) -> Any:
        async def use(client: Any) -> Any:
            return await generate(
                client, PROMPT, model="m", max_tokens=1, timeout_s=60.0,
                version=lambda: served_version(client),
            )  # fmt: skip

        return asyncio.run(on_server(server, use))

    assert rollouts(reply)[0].versions.tolist() == [3, 3]
    with pytest.raises(EngineError, match="from version 3 to 4"):
        rollouts(update)


@pytest.mark.parametrize(
    ("answer", "error"),
    [({"weight_version": "default"}, UsageError), ("[]", EngineError), ((404, {}), UsageError)],
)
def test_a_label_that_is_no_version_is_refused(answer, error):
    with pytest.raises(error):
        asyncio.run(on_server(lambda *_: answer, served_version))


# --- vLLM's own protocol -------------------------------------------------------------------------


def token_choice(index: int = 0, **other: Any) -> dict[str, Any]:
    """One choice of `/inference/v1/generate`; the weights changed after its first token."""
    ids, logprobs = [20 + index, 21], [-0.1 - index, -1 / 3]
    content = [
        {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
    return {
        "index": index,
        "finish_reason": "length",
        "token_ids": ids,
        "logprobs": {"content": content},
        "weight_versions": spans,
        "routed_experts": None,
    } | other


def ask_tokens(reply: Reply, **other: Any) -> Any:
    arguments = {"max_tokens": 8, "timeout_s": 60.0} | other
    return asyncio.run(
        on_server(reply, lambda client: generate_tokens(client, PROMPT, **arguments))
    )


def test_every_token_has_the_version_that_sampled_it():
    asked = []

    def reply(path: str, body: Any) -> Any:
        asked.append((path, body))
        return {"choices": [token_choice(1, routed_experts="text"), token_choice(0)]}

    first, second = ask_tokens(
        reply, n=2, seed=3, cache_salt="v4", stop_token_ids=[9], prompt_id="p",
        sampling_params={"top_p": 0.5}, extra_body={"priority": 1},
    )  # fmt: skip
    ((path, body),) = asked
    assert path == "/inference/v1/generate"
    assert {"token_ids": PROMPT, "cache_salt": "v4", "priority": 1}.items() <= body.items()
    assert body["sampling_params"] == {
        "logprobs": 0, "detokenize": False, "n": 2, "max_tokens": 8, "temperature": 1.0, "seed": 3,
        "stop_token_ids": [9], "top_p": 0.5,
    }  # fmt: skip
    assert first.tokens.tolist() == [*PROMPT, 20, 21]
    np.testing.assert_array_equal(second.logprobs, [-1.1, -1 / 3])
    np.testing.assert_array_equal(first.versions, [4, 5])
    assert (first.finish_reason, first.prompt_id, first.prompt_length) == ("length", "p", 3)
    assert (dict(first.attachments), dict(second.attachments)) == ({}, {"routed_experts": "text"})


def spans(*each: Any) -> dict[str, Any]:
    named = [dict(zip(("version", "start", "end"), one, strict=True)) for one in each]
    return token_choice(weight_versions=named)


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        ("<html>", EngineError, "no answer of this protocol"),
        ({"choices": [token_choice(1)]}, EngineError, r"choices \[1\] where 1"),
        ({"choices": [token_choice(token_ids=None)]}, EngineError, "that are none"),
        ({"choices": [token_choice(token_ids=[20])]}, EngineError, "1 tokens"),
        ({"choices": [token_choice(token_ids=[21, 20])]}, EngineError, "log-probabilities of"),
        ({"choices": [token_choice(logprobs=None)]}, UnsupportedError, "no log-probabilities"),
        ({"choices": [token_choice(logprobs={"content": [1]})]}, EngineError, "no choice of this"),
        ({"choices": [token_choice(weight_versions=None)]}, UnsupportedError, "weight_versions"),
        ({"choices": [token_choice(weight_versions=[7])]}, EngineError, "no choice of this"),
        ({"choices": [spans(("default", 0, 2))]}, EngineError, "labelled 'default'.*update it"),
        ({"choices": [spans((4, 0, 2))]}, EngineError, "labelled 4"),
        ({"choices": [spans(("4", 0, 1))]}, EngineError, "do not fit: .* end at 1 of 2"),
        ({"choices": [spans(("4", 0, None))]}, EngineError, "of tokens 0 to None"),
        ((503, {"message": "no worker"}), EngineError, "status 503.*no worker"),
        ((403, {"message": "--enable-scale-out"}), UsageError, "status 403"),
    ],
)
def test_any_other_answer_of_vllm_is_a_typed_error(answer, error, match):
    with pytest.raises(PrimeblocksError, match=match) as caught:
        ask_tokens(lambda *_: answer)
    assert type(caught.value) is error


@given(
    st.sampled_from(["index", "token_ids", "logprobs", "weight_versions", "finish_reason"]),
    ANYTHING,
)
def test_anything_in_the_place_of_a_part_of_vllms_is_an_answer_or_a_typed_error(name, value):
    answer = {"choices": [token_choice() | {name: value}]}
    try:
        (rollout,) = ask_tokens(lambda *_: answer)
    except PrimeblocksError:
        return
    assert rollout.tokens.tolist() == PROMPT + answer["choices"][0]["token_ids"]


def split(reply: Reply, **other: Any) -> Any:
    arguments = {"max_tokens": 8, "timeout_s": 60.0} | other
    return asyncio.run(
        on_server(reply, lambda client: generate_split(client, client, PROMPT, **arguments))
    )


def test_decode_is_sent_what_prefill_said_of_its_pages():
    asked = []

    def reply(_: str, body: Any) -> Any:
        asked.append(body)
        if body["kv_transfer_params"].get("do_remote_decode"):
            content = [{"token_id": 7, "logprob": -1.0}]
            one = token_choice(
                token_ids=[7],
                logprobs={"content": content},
                weight_versions=[{"version": "4", "start": 0, "end": 1}],
                routed_experts="of the prompt",
            )
            return {"choices": [one], "kv_transfer_params": {"remote_block_ids": [[1, 2]]}}
        return {"choices": [token_choice(routed_experts="of the answer")]}

    first, second = split(reply, cache_salt="v4", extra_body={"priority": 1}, prompt_id="p")
    prefill, decode = asked
    assert prefill["sampling_params"]["max_tokens"] == 1
    assert decode["sampling_params"]["max_tokens"] == 8
    assert decode["kv_transfer_params"] == {"remote_block_ids": [[1, 2]]}
    assert all((each["cache_salt"], each["priority"]) == ("v4", 1) for each in asked)
    assert first.attachments["routed_experts"] == "of the prompt"
    assert (first.tokens.tolist(), first.prompt_id) == ([*PROMPT, 7], "p")
    assert second.attachments["routed_experts"] == "of the answer"
    assert second.versions.tolist() == [4, 5]


def test_pages_are_read_once_whatever_the_client_retries():
    decoded = []

    def reply(_: str, body: Any) -> Any:
        if body["kv_transfer_params"].get("do_remote_decode"):
            return {"choices": [token_choice()], "kv_transfer_params": {"remote_port": 1}}
        decoded.append(body)
        return 503, {"message": "busy"}

    async def use(client: Any) -> None:
        eager = client.with_options(max_retries=3)
        with pytest.raises(EngineError, match="status 503"):
            await generate_split(eager, eager, PROMPT, max_tokens=8, timeout_s=60.0)

    asyncio.run(on_server(reply, use))
    assert len(decoded) == 1


@pytest.mark.parametrize("told", [None, [], "x"])
def test_a_prefill_that_sends_nothing_is_told_how_to_start(told):
    answer = {"choices": [token_choice()], "kv_transfer_params": told}
    with pytest.raises(UnsupportedError, match="--kv-transfer-config.*NixlConnector"):
        split(lambda *_: answer)


def test_prefill_and_decode_have_one_deadline():
    arrived, never = asyncio.Event(), asyncio.Event()
    clock = ManualClock()

    async def reply(_: str, body: Any) -> Any:
        if body["kv_transfer_params"].get("do_remote_decode"):
            clock.advance(4.0)
            return {"choices": [token_choice()], "kv_transfer_params": {"remote_port": 1}}
        arrived.set()
        await never.wait()
        raise Died

    async def use(client: Any) -> None:
        asked = asyncio.ensure_future(
            generate_split(client, client, PROMPT, max_tokens=8, timeout_s=5.0, clock=clock)
        )
        await arrived.wait()
        clock.advance(1.0)
        with pytest.raises(DeadlineError, match="within 1 s"):
            await asked
        never.set()

    asyncio.run(on_server(reply, use))
