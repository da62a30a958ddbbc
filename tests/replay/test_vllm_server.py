"""Routes over HTTP: the middleware by itself, then in vLLM's own server."""

import asyncio
import base64
import io
import json
import struct
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from primeblocks.errors import CorruptionError, EngineError, UsageError
from primeblocks.replay import compare, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.adapters.vllm import (
    MEDIA_TYPE,
    RouterShape,
    RoutesMiddleware,
    read_answer,
    routes_from_base64,
    server_args,
)
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters import vllm as into_vllm
from tests.deadlines import HANG_S, START_S
from tests.engine_forks import Nursery
from tests.engine_job import call
from tests.replay.vllm_served import logprobs_of
from tests.weightsync.vllm_site import Served

SHAPE = RouterShape(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2)
ROWS = np.arange(24, dtype=np.uint8).reshape(3, 4, 2)
ROWS[1] = 255  # missing


def npy(rows: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


PROMPT = np.random.default_rng(1).integers(4, 512, 40).tolist()
LONG_PROMPT = np.random.default_rng(0).integers(4, 512, 150).tolist()
ANSWER = {"id": "x", "choices": [{"index": 0, "routed_experts": npy(ROWS)}, {"index": 1}]}


def sealed(text: bytes, *files: bytes) -> bytes:
    """A body whose digest is right, whatever it says."""
    sizes = struct.pack(f"<{2 + len(files)}Q", len(text), len(files), *map(len, files))
    body = sizes + text + b"".join(files)
    data = struct.pack("<4sHHQ", b"PBHT", 1, 0, len(body)) + body
    return data + xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"null", b"1", b'"x"', b"", b"\xff", b"{"],
    ids=range(9),
)
def test_a_sealed_answer_of_nonsense_is_corruption(text):
    with pytest.raises(CorruptionError, match="JSON of an answer"):
        read_answer(sealed(text))


def test_files_of_nonsense_are_corruption():
    with pytest.raises(CorruptionError, match="npy"):
        read_answer(sealed(b"{}", b"\x93NUMPY\x01\x00\x10\x00{'descr': (      "))
    answer = read_answer(sealed(b"{}", b""))
    assert answer.rows == (None,)
    for choice in (1, -1):
        with pytest.raises(UsageError, match=rf"0\.\.0; got {choice}"):
            answer.routes(choice, SHAPE, tokens=4)


def respond(*, accept: str, status: int = 200, kind: str = "application/json") -> list[Any]:
    """What a client gets through the middleware from a server that sends in two pieces."""
    body = json.dumps(ANSWER).encode()
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Content-Type", kind.encode()), (b"content-length", b"%d" % len(body))]
        headers.append((b"x-request-id", b"7"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:9], "more_body": True})
        await send({"type": "http.response.body", "body": body[9:]})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"Accept", accept.encode())]}
    asyncio.run(RoutesMiddleware(app)(scope, None, send))
    return sent


def test_a_client_that_asks_gets_bytes():
    start, body = respond(accept=f"{MEDIA_TYPE}, application/json")
    headers = dict(start["headers"])
    assert headers[b"content-type"] == MEDIA_TYPE.encode()
    assert headers[b"content-length"] == b"%d" % len(body["body"])
    assert headers[b"x-request-id"] == b"7"
    answer = read_answer(body["body"])
    counted = {"known": len(ROWS) - 1, "missing": 1}
    choices = [{"index": 0, "routed_experts_coverage": counted}, {"index": 1}]
    assert answer.json == {"id": "x", "choices": choices}
    np.testing.assert_array_equal(answer.rows[0], ROWS)
    assert np.shares_memory(answer.rows[0], np.frombuffer(body["body"], np.uint8))
    assert answer.rows[1] is None
    with pytest.raises(CorruptionError, match="choice 1 came without"):
        answer.routes(1, SHAPE, tokens=4)


@pytest.mark.parametrize(
    "request_",
    [
        {"accept": "application/json"},
        {"accept": MEDIA_TYPE, "status": 400},
        {"accept": MEDIA_TYPE, "kind": "text/event-stream"},
    ],
    ids=["another client", "an error", "a stream"],
)
def test_everything_else_passes_unchanged(request_):
    start, *bodies = respond(**request_)
    assert b"".join(part["body"] for part in bodies) == json.dumps(ANSWER).encode()
    assert start["status"] == request_.get("status", 200)
    assert len(bodies) == 2


def test_other_protocols_pass_unchanged():
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    asyncio.run(RoutesMiddleware(app)({"type": "lifespan"}, 1, 2))
    assert seen == [({"type": "lifespan"}, 1, 2)]


def test_a_damaged_answer_is_refused():
    *_, message = respond(accept=MEDIA_TYPE)
    for place in range(len(message["body"])):
        damaged = bytearray(message["body"])
        damaged[place] ^= 1
        with pytest.raises(CorruptionError):
            read_answer(damaged)
    with pytest.raises(CorruptionError):
        read_answer(json.dumps(ANSWER).encode())


# --- live ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "model"
    tiny_models.save("glm4_moe", path, dtype="float32", init_std=0.08)
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.2}
    sampling |= {f"{name}_penalty": 1.5 for name in ("repetition", "presence", "frequency")}
    (path / "generation_config.json").write_text(json.dumps(sampling))  # Must not apply.
    return path


@pytest.fixture(scope="module")
def saw(model: Path) -> dict[str, Any]:
    return call(_serve, model)


def _serve(model: Path) -> dict[str, Any]:
    """What clients of a server of all three blocks get."""
    with Nursery() as nursery:  # Before anything starts a thread.
        from primeblocks.kvoffload.adapters.vllm import server_args as pages_args

        sizes = {"primary_bytes": 8 << 20, "host_bytes": 8 << 20}
        words = [*server_args(max_bytes=1 << 20, device="cpu"), "--block-size", "32"]
        words += pages_args(**sizes, routes_bytes_per_token=SHAPE.bytes_per_token)
        served = Served(model, model.parent / "log", *words, nursery=nursery)
        try:
            served.wait(START_S)
            turns, rollouts = _two_turns(served.url), asyncio.run(_rollouts(served.url, model))
            return {"turns": turns, "rollouts": rollouts, "state": _state(served.url)}
        finally:
            served.close()


def _state(url: str) -> tuple[Any, str]:
    calls = into_vllm.VllmServer(url).until(time.monotonic() + HANG_S)
    (worker,) = asyncio.run(calls.collective_rpc("primeblocks_state"))
    metrics = urllib.request.urlopen(f"{url}/metrics", timeout=HANG_S).read().decode()
    return worker, metrics


async def _rollouts(url: str, model: Path) -> list[Any]:
    import openai

    from primeblocks.async_loop.adapters.openai import generate, served_version

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        with pytest.raises(EngineError, match="'default'"):
            await served_version(client)
        label = {"new_version": "3"}
        await client.post(f"{url}/update_weight_version", cast_to=str, body=label)
        asked = {"version": lambda: served_version(client), "timeout_s": 60.0, "n": 2}
        with pytest.raises(UsageError, match="status 4"):
            await generate(client, PROMPT, model=str(model), max_tokens=2000, **asked)
        return await generate(client, PROMPT, model=str(model), max_tokens=16, **asked)


def _two_turns(url: str) -> tuple[bytes, bytes, list[int], bytes]:
    """An answer in both forms, then the prompt of the next turn, and its answer."""
    text = ask(url, LONG_PROMPT, accept="application/json")
    body = ask(url, LONG_PROMPT, accept=MEDIA_TYPE)
    tokens = LONG_PROMPT + json.loads(text)["choices"][0]["token_ids"]
    turn = [*tokens, *PROMPT]
    start = len(tokens) - 1  # New rows only.
    return text, body, turn, ask(url, turn, accept=MEDIA_TYPE, routed_experts_prompt_start=start)


def ask(url: str, prompt: list[int], *, accept: str, **sampling: Any) -> bytes:
    settings = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    request = urllib.request.Request(
        f"{url}/inference/v1/generate",
        json.dumps({"token_ids": prompt, "sampling_params": settings | sampling}).encode(),
        {"Content-Type": "application/json", "Accept": accept},
    )
    with urllib.request.urlopen(request, timeout=HANG_S) as response:
        assert response.headers["Content-Type"].startswith(accept)
        return response.read()


@pytest.fixture(scope="module")
def trainer(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def own_routes(trainer: Any, tokens: list[int]) -> Any:
    with record(routers(trainer)) as tape:
        trainer(input_ids=torch.tensor([tokens]), use_cache=False)
    return tape.routes


@pytest.mark.vllm
def test_one_server_has_what_all_three_blocks_ask_for(saw):
    worker, metrics = saw["state"]
    assert "attach" in worker["message"]
    assert "primeblocks_kvoffload_stores" in metrics


@pytest.mark.vllm
def test_the_openai_client_gets_rollouts(saw, trainer):
    got = saw["rollouts"]
    assert len({tuple(rollout.completion) for rollout in got}) == 2
    for rollout in got:
        assert rollout.prompt.tolist() == PROMPT
        assert set(rollout.versions) == {3}
        routes = routes_from_base64(
            rollout.attachments["routed_experts"], SHAPE, tokens=len(rollout.tokens)
        )
        with record(routers(trainer)) as tape:
            own = logprobs_of(trainer, rollout.tokens.copy())[len(PROMPT) - 1 :]
        assert compare(routes, tape.routes).overall == 1.0
        # Float32 sums of up to 512 terms, over log-probabilities of about -8.
        np.testing.assert_allclose(rollout.logprobs, own, atol=8 * 512 * 2**-24)


@pytest.mark.vllm
def test_vllms_server_sends_the_routes_in_both_forms(saw, trainer):
    text, body, turn, next_body = saw["turns"]
    choice, answer = json.loads(text)["choices"][0], read_answer(body)
    tokens = LONG_PROMPT + choice["token_ids"]
    by_text = routes_from_base64(choice["routed_experts"], SHAPE, tokens=len(tokens))
    assert answer.json["choices"][0]["token_ids"] == choice["token_ids"]
    assert answer.routes(0, SHAPE, tokens=len(tokens)) == by_text
    assert len(text) - len(body) > 0.15 * len(choice["routed_experts"])
    found = compare(by_text, own_routes(trainer, tokens))
    assert found.overall == 1.0
    assert found.tokens == len(tokens) - 1

    answer, start = read_answer(next_body), len(tokens) - 1
    ids = [*turn, *answer.json["choices"][0]["token_ids"]]
    newer = answer.routes(0, SHAPE, tokens=len(ids), prompt_start=start)
    whole = by_text.extend(newer[start:], start=start)
    assert whole.missing.nonzero()[0].tolist() == [len(ids) - 1]
    assert compare(whole, own_routes(trainer, ids)).overall == 1.0
