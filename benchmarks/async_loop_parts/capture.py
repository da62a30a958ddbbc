"""Latency that a capture server adds to an engine's answers, with 1,000 sessions at a time.

A client in a process of its own keeps one connection a session, each with a request under way at
nearly all times: it asks again as soon as it is answered, with the answer and 200 characters more
in its messages. The engine sleeps for 2 to 6 s and returns 64 tokens with log-probabilities, so
some 250 requests a second arrive. `added_latency_ms` is the time from the call of the application
to the last byte that it sends, beyond the time that the engine was told to sleep: it includes
timers of asyncio, which wake up to 1 ms late, and waiting for the event loop. `at_client` is what
the client waits beyond the sleep, HTTP and the client itself included; the floor is the same with
uvicorn alone, which sleeps and returns as many bytes.

Prompts are rendered by `ChatTemplate` with a byte-level BPE and ChatML; no rollout forks. Memory is
what the process of the server has resident after each wave of sessions, which are opened, recorded,
made into rollouts and closed. The garbage collector's old generation is frozen once, as long-lived
processes do: a full collection of what transformers and torch import takes 0.1 s and more.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn

from primeblocks.capture import Recorder
from primeblocks.capture.adapters.starlette import capture_app
from primeblocks.capture.adapters.transformers import ChatTemplate
from primeblocks.errors import how_it_ended

__all__ = ["figures"]

SESSIONS, TURNS, WAVES, TOKENS = 1000, 4, 4, 64
SLEEP_S = 4.0  # Half of it less or more.
TIMEOUT_S = 120.0
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def figures() -> dict[str, tuple[float, str, str]]:
    gc.collect()
    gc.freeze()
    try:
        with _client() as client:
            inside, at_client, growth = asyncio.run(_capture(client))
            floor, floor_at_client = asyncio.run(_floor(client))
            assert client.stdin is not None
            client.stdin.close()
            assert (code := client.wait(TIMEOUT_S)) == 0, f"the client {how_it_ended(code)}"
    finally:
        gc.unfreeze()
    name = "async_loop.capture.added_latency_ms"
    values = {"": inside, ".at_client": at_client}
    values |= {".floor": floor, ".floor.at_client": floor_at_client}
    found = {
        f"{name}{where}{end}": (float(np.percentile(each, at)), "ms", "")
        for where, each in values.items()
        for end, at in (("", 50), (".p99", 99))
    }
    missed = float(np.mean(np.array(inside) > 2))
    return found | {
        f"{name}.above_2ms": (missed, "ratio", ""),
        "async_loop.capture.requests_per_s": (SESSIONS / SLEEP_S, "1/s", ""),
        "async_loop.capture.memory_growth_bytes_per_session": (growth, "B", ""),
    }


def sleep_of(seed: int) -> float:
    """Seconds that the engine sleeps for a request."""
    return SLEEP_S * (0.5 + np.random.default_rng(seed).random())


async def _capture(client: Any) -> tuple[list[float], list[float], float]:
    """Latencies in the server and at the client, and growth of memory in bytes a session."""
    template = ChatTemplate(_tokenizer())
    answer = template.encode("words of an answer " * TOKENS)[: TOKENS - 1]
    answer = [*answer, *template.stop_token_ids]
    logprobs, versions = np.full(TOKENS, -1.0), np.zeros(TOKENS, np.int64)
    slept: ContextVar[list[float]] = ContextVar("slept")

    async def generate(prompt: list[int], *, seed: int, **_: Any) -> Any:
        sleep_s = sleep_of(seed)
        await asyncio.sleep(sleep_s)
        slept.get().append(sleep_s)
        return SimpleNamespace(
            token_ids=answer,
            logprobs=logprobs,
            versions=versions,
            finish_reason="stop",
            routed_experts=None,
        )

    recorder = Recorder(generate, template)
    app, inside, at_client, resident = capture_app(recorder), [], [], []

    async def timed(scope: Any, receive: Any, send: Any) -> None:
        slept.set(asked := [])
        begun = time.perf_counter()
        await app(scope, receive, send)
        inside.append((time.perf_counter() - begun - asked[0]) * 1e3)

    async with _served(timed) as recorder.url:
        for _ in range(WAVES):
            async with AsyncExitStack() as stack:
                opened = [
                    await stack.enter_async_context(recorder.session()) for _ in range(SESSIONS)
                ]
                at_client += await _ask(client, [[x.base_url, x.key] for x in opened])
            for each in opened:
                assert each.conversation.counts == {"start": 1, "clean": TURNS - 1}
                (rollout,) = each.rollouts()
                assert rollout.loss_mask.sum() == TURNS * TOKENS
            del opened, each, rollout
            gc.collect()
            resident.append(_resident())
    assert len(inside) == len(at_client) == WAVES * SESSIONS * TURNS
    return inside, at_client, float(statistics.median(np.diff(resident[1:]))) / SESSIONS


async def _floor(client: Any) -> tuple[list[float], list[float]]:
    """Latencies of uvicorn with an application that does nothing else."""
    inside = []
    said = json.dumps({"choices": [{"message": {"content": "words of an answer " * 13}}]}).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun, body = time.perf_counter(), b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        sleep_s = sleep_of(json.loads(body)["seed"])
        await asyncio.sleep(sleep_s)
        length = (b"content-length", str(len(said)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": said})
        inside.append((time.perf_counter() - begun - sleep_s) * 1e3)

    async with _served(app) as url:
        return inside, await _ask(client, [[url, "key"]] * SESSIONS)


@asynccontextmanager
async def _served(app: Any) -> AsyncIterator[str]:
    """Serve an application as `CaptureServer` does; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            http="h11",
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def _ask(client: Any, sessions: list[list[str]]) -> list[float]:
    def call() -> list[float]:
        print(json.dumps(sessions), file=client.stdin, flush=True)
        return json.loads(client.stdout.readline())

    return await asyncio.wait_for(asyncio.to_thread(call), TIMEOUT_S)


def _client() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.capture_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def _tokenizer() -> Any:
    """A byte-level BPE trained on this file, with ChatML's tokens."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train_from_iterator([Path(__file__).read_text()], vocab_size=1000, show_progress=False)
    made.add_tokens([AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, chat_template=TEMPLATE)
