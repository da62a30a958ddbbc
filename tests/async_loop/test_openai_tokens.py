"""vLLM's own protocol through the `openai` client, against a server of known behaviour.

With vLLM's own server: tests/integration/test_fleet_vllm.py.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openai")

from primeblocks.async_loop.adapters.openai import generate_split, generate_tokens
from primeblocks.errors import (
    CapacityError,
    DeadlineError,
    EngineError,
    PrimeblocksError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing.faults import ManualClock
from tests.async_loop.client_site import ANYTHING, PROMPT, Died, Reply, on_server
from tests.deadlines import HANG_S


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


@pytest.mark.parametrize(("sent", "count"), [({"n": 2}, 2), ({}, 1)])
def test_sampling_parameters_of_the_extra_body_say_how_many_completions_come(sent, count):
    def reply(path: str, body: Any) -> Any:
        assert body["sampling_params"] == sent
        return {"choices": [token_choice(i) for i in range(count)]}

    assert len(ask_tokens(reply, n=3, extra_body={"sampling_params": sent})) == count


def spans(*each: Any) -> dict[str, Any]:
    named = [dict(zip(("version", "start", "end"), one, strict=True)) for one in each]
    return token_choice(weight_versions=named)


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        # The checks of both protocols have their other cases in test_openai_client.py.
        ("<html>", EngineError, "a malformed answer"),
        ({"choices": [token_choice(token_ids=None)]}, EngineError, "are not token ids"),
        ({"choices": [token_choice(token_ids=[21, 20])]}, EngineError, "log-probabilities of"),
        ({"choices": [token_choice(logprobs=None)]}, UnsupportedError, "no log-probabilities"),
        ({"choices": [token_choice(logprobs={"content": [1]})]}, EngineError, "a malformed choice"),
        ({"choices": [token_choice(weight_versions=None)]}, UnsupportedError, "weight_versions"),
        ({"choices": [token_choice(weight_versions=[7])]}, EngineError, "a malformed choice"),
        (
            {"choices": [spans(("default", 0, 2))]},
            EngineError,
            "label 'default'.*Update the weights",
        ),
        ({"choices": [spans((4, 0, 2))]}, EngineError, "label 4"),
        (
            {"choices": [spans(("4", 0, 1))]},
            EngineError,
            "do not fit the tokens: .* end at token 1",
        ),
        ({"choices": [spans(("4", 0, None))]}, EngineError, "of tokens 0 to None"),
        ((403, {"message": "--enable-scale-out"}), UsageError, "status 403"),
    ],
)
def test_any_other_answer_of_vllm_is_a_typed_error(answer, error, match):
    with pytest.raises(PrimeblocksError, match=match) as caught:
        ask_tokens(lambda *_: answer)
    assert type(caught.value) is error


@settings(max_examples=settings().max_examples // 3)
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
        with pytest.raises(CapacityError, match="status 503"):
            await generate_split(eager, eager, PROMPT, max_tokens=8, timeout_s=HANG_S)

    asyncio.run(on_server(reply, use))
    assert len(decoded) == 1


@pytest.mark.parametrize("told", [None, [], "x"])
def test_a_prefill_that_sends_nothing_is_told_how_to_start(told):
    answer = {"choices": [token_choice()], "kv_transfer_params": told}
    with pytest.raises(UnsupportedError, match="--kv-transfer-config.*NixlConnector"):
        split(lambda *_: answer)


def test_a_prefill_that_is_aborted_is_asked_again():
    answer = {"choices": [token_choice(finish_reason="abort", token_ids=[], logprobs=None)]}
    with pytest.raises(
        PrimeblocksError, match="a prompt of 3 tokens .* Send the request again"
    ) as caught:
        split(lambda *_: answer)
    assert type(caught.value) is PrimeblocksError


def test_a_decode_that_fails_names_whose_pages_it_was_to_read():
    def reply(_: str, body: Any) -> Any:
        if body["kv_transfer_params"].get("do_remote_decode"):
            return {"choices": [token_choice()], "kv_transfer_params": {"remote_port": 1}}
        return 500, {"message": "Internal server error"}

    async def use(client: Any) -> str:
        prefill = client.with_options(base_url=f"{client.base_url}prefill/")
        with pytest.raises(PrimeblocksError, match="status 500") as caught:
            await generate_split(prefill, client, PROMPT, max_tokens=8, timeout_s=HANG_S)
        return f"{prefill.base_url} {caught.value.__notes__}"

    url, _, notes = asyncio.run(on_server(reply, use)).partition(" ")
    assert f"pages from {url}." in notes


def test_a_prompt_of_other_weights_than_its_answer_is_asked_again():
    def reply(_: str, body: Any) -> Any:
        if body["kv_transfer_params"].get("do_remote_decode"):
            spans = [{"version": "3", "start": 0, "end": 2}]
            choice = token_choice(weight_versions=spans)
            return {"choices": [choice], "kv_transfer_params": {"remote_port": 1}}
        return {"choices": [token_choice()]}

    with pytest.raises(PrimeblocksError, match="version 3 .* version 4 continued. Send") as caught:
        split(reply)
    assert type(caught.value) is PrimeblocksError


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
