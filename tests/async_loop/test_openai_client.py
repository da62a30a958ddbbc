"""The adapter of the `openai` client, against a server of known behaviour.

With vLLM's own server: tests/replay/test_vllm_server.py.
"""

import asyncio
import errno
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

openai = pytest.importorskip("openai")

from primeblocks.async_loop.adapters.openai import (  # noqa: E402
    generate,
    served_version,
)
from primeblocks.errors import (  # noqa: E402
    CapacityError,
    DeadlineError,
    EngineError,
    PrimeblocksError,
    UnsupportedError,
    UsageError,
)
from primeblocks.serving import Fleet  # noqa: E402
from primeblocks.testing.faults import ManualClock  # noqa: E402
from tests.async_loop.client_site import ANYTHING, PROMPT, Died, Reply, on_server  # noqa: E402
from tests.deadlines import HANG_S  # noqa: E402


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


def ask(reply: Reply, **other: Any) -> Any:
    arguments = {"model": "m", "version": 4, "max_tokens": 8, "timeout_s": 60.0} | other
    return asyncio.run(on_server(reply, lambda client: generate(client, PROMPT, **arguments)))


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.5, "top_k": 20}])
def test_no_sampling_default_of_the_checkpoint_is_left_to_the_server(extra):
    asked = []

    def reply(_: str, body: Any) -> Any:
        asked.append(body)
        return {"choices": [choice()]}

    ask(reply, extra_body=extra)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    neutral |= {f"{name}_penalty": 0.0 for name in ("presence", "frequency")}
    wanted = neutral | {"repetition_penalty": 1.0} | extra
    assert {name: asked[0].get(name) for name in wanted} == wanted


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
        ("<html>", EngineError, "a malformed answer"),
        pytest.param("[" * 100_000, EngineError, "a malformed answer", id="deep"),
        ({"choices": [{}]}, EngineError, "a malformed answer"),
        ({"choices": []}, EngineError, r"for 1 choices, but got the indices \[\]"),
        ({"choices": [choice(1)]}, EngineError, r"got the indices \[1\]"),
        ({"choices": [choice(token_ids=None)]}, UnsupportedError, "return_token_ids"),
        ({"choices": [choice(token_ids=[])]}, EngineError, "0 tokens"),
        ({"choices": [choice(token_ids=[20, -1])]}, EngineError, "are not token ids"),
        ({"choices": [choice(token_ids=[20, True])]}, EngineError, "are not token ids"),
        ({"choices": [choice(token_ids=[20, 1 << 70])]}, EngineError, "are not token ids"),
        ({"choices": [choice(token_ids=[21, 20])]}, EngineError, "log-probabilities of"),
        ({"choices": [choice(prompt_token_ids=[1, *PROMPT])]}, EngineError, "a prompt other than"),
        ({"choices": [choice(prompt_token_ids=None)]}, UnsupportedError, "no prompt_token_ids"),
        ({"choices": [choice(finish_reason=None)]}, EngineError, "None as its finish_reason"),
        ({"choices": [choice(routed_experts=[1])]}, EngineError, "as its routed_experts"),
        ({"choices": [choice(logprobs=None)]}, UnsupportedError, "no log-probabilities"),
        ({"choices": [logprobs(-1.0)]}, EngineError, "2 tokens"),
        ({"choices": [logprobs(-1.0, None)]}, EngineError, "None as the .* of token 1"),
        ({"choices": [logprobs(float("nan"), -1.0)]}, EngineError, "nan as the .* of token 0"),
        ({"choices": [logprobs(-1.0, -9999.0)]}, EngineError, "-9999.0 as the"),
        ((400, {"message": "too long"}), UsageError, "status 400.*too long"),
        ({"choices": [logprobs(10**400, -1.0)]}, EngineError, "100000.* of token 0"),
        ({"choices": [logprobs(-1.0, 7.5)]}, EngineError, "7.5 as the .* of token 1"),
        (
            {"choices": [choice(finish_reason="abort", token_ids=[], logprobs=None)]},
            PrimeblocksError,
            "aborted before its end. Send the request again",
        ),
        ({"choices": [choice(finish_reason="abort")]}, PrimeblocksError, "aborted before its end"),
        ({"choices": [choice(finish_reason="error")]}, PrimeblocksError, "aborted before its end"),
        # A server that has no room is well: an EngineError would take it out of a fleet for good.
        ((408, {}), CapacityError, "status 408"),
        ((429, {}), CapacityError, "status 429"),
        ((503, {"message": "queue is full"}), CapacityError, "status 503.*queue is full"),
        # vLLM's answer to any error in one request.
        ((500, {"message": "boom"}), PrimeblocksError, "status 500.*boom"),
        ((500, {"message": "EngineCore encountered an issue. See"}), EngineError, "status 500"),
        ((502, {"message": "bad gateway"}), EngineError, "status 502"),
    ],
)
def test_any_other_answer_is_a_typed_error(answer, error, match):
    with pytest.raises(PrimeblocksError, match=match) as caught:
        ask(lambda *_: answer)
    assert type(caught.value) is error


PLACES = ["index", "token_ids", "prompt_token_ids", "logprobs", "finish_reason", "routed_experts"]


@settings(max_examples=settings().max_examples // 3)
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
    said = answer["choices"][0]
    assert rollout.tokens.tolist() == said["prompt_token_ids"] + said["token_ids"]
    assert rollout.finish_reason == said["finish_reason"]
    assert isinstance(rollout.attachments.get("routed_experts", ""), str)


def test_log_probabilities_without_ids_are_taken_by_their_place():
    for names in (None, ["a", "b"]):
        (rollout,) = ask(lambda *_, names=names: {"choices": [logprobs(-1.0, -2, names=names)]})
        assert rollout.logprobs.tolist() == [-1.0, -2.0]


def test_the_end_of_the_server_is_an_engine_error():
    def die(*_: Any) -> None:
        raise Died

    with pytest.raises(EngineError, match="a completion of 3 tokens by http://127.0.0.1"):
        ask(die)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_process_without_file_descriptors_is_no_fault_of_the_server(monkeypatch, says_so):
    def full(*_: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    async def refuse(*_: Any, **__: Any) -> None:
        if not says_so:  # as the lookup of a host name
            monkeypatch.setattr("primeblocks.errors.os.open", full)
        met = OSError(errno.EMFILE if says_so else errno.EBUSY, "no connection")
        raise openai.APIConnectionError(request=None) from met

    async def use(client: Any) -> None:
        monkeypatch.setattr(client._client, "send", refuse)
        await generate(client, PROMPT, model="m", version=0, max_tokens=1, timeout_s=HANG_S)

    with pytest.raises(CapacityError, match="too many open files"):
        asyncio.run(on_server(lambda *_: {"choices": [choice()]}, use))
    monkeypatch.undo()


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
                client, PROMPT, model="m", max_tokens=1, timeout_s=HANG_S,
                version=lambda: served_version(client),
            )  # fmt: skip

        return asyncio.run(on_server(server, use))

    assert rollouts(reply)[0].versions.tolist() == [3, 3]
    with pytest.raises(PrimeblocksError, match="from version 3 to 4") as caught:
        rollouts(update)
    assert not isinstance(caught.value, EngineError | UsageError)


def test_a_fleet_keeps_engines_that_are_well_and_closes_those_that_are_not():
    answers = [
        (429, {}),
        {"choices": [choice(finish_reason="abort", token_ids=[], logprobs=None)]},
        {"choices": [choice()]},
        (500, {}),
        "<html>",
    ]
    versions = iter([0, 0, 0, 2, 3, 3, 3, 3])

    async def version() -> int:
        return next(versions)

    async def use(client: Any) -> None:
        ask = partial(generate, client, model="m", version=version, max_tokens=1, timeout_s=HANG_S)
        fleet = Fleet({"a": ask})
        for match in ("status 429", "aborted", "from version 2 to 3", "status 500"):
            with pytest.raises(PrimeblocksError, match=match):
                await fleet(PROMPT)
            assert len(fleet.states()) == 1
        with pytest.raises(EngineError, match="malformed"):
            await fleet(PROMPT)
        assert not fleet.states()

    asyncio.run(on_server(lambda *_: answers.pop(0), use))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"weight_version": "default"}, EngineError),
        ({"weight_version": "9" * 5000}, EngineError),
        ({"weight_version": str(1 << 63)}, EngineError),
        ("[]", EngineError),
        ((404, {}), UsageError),
    ],
)
def test_a_label_that_is_no_version_is_refused(answer, error):
    with pytest.raises(error):
        asyncio.run(on_server(lambda *_: answer, served_version))
