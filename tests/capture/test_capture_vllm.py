"""A real vLLM behind the capture server: rollouts are what the engine returned, routes included."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeblocks import weightsync
from primeblocks.async_loop import cache_salt
from primeblocks.capture import CaptureBounds
from primeblocks.testing import tiny_models
from tests.capture.chat_site import ADD, template, tokenizer
from tests.deadlines import HANG_S, START_S
from tests.engine_job import call

pytestmark = pytest.mark.vllm
SIZES = {"num_layers": 2, "hidden": 64, "num_experts": 8, "top_k": 2}
TURNS = 4


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    return call(_run, tmp_path_factory.mktemp("capture"))


def _run(folder: Path) -> dict:
    return asyncio.run(_see(folder))


async def _see(folder: Path) -> dict:
    from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args
    from primeblocks.capture.adapters.uvicorn import CaptureServer
    from primeblocks.replay.adapters.vllm import engine_args
    from primeblocks.weightsync.adapters import vllm as into_vllm

    vocab = len(tokenizer())
    path = tiny_models.save("qwen3_moe", folder / "m", dtype="float32", vocab=vocab, **SIZES)
    model = tiny_models.build("qwen3_moe", dtype="float32", vocab=vocab, **SIZES)
    arguments = base_engine_args(
        path, seed=0, dtype="float32", max_model_len=1024, max_num_seqs=4, kv_bytes=16 << 20
    )
    arguments |= engine_args(max_bytes=16 << 20, device="cpu") | into_vllm.engine_args()
    source = weightsync.describe(model)
    plan = weightsync.plan_sync([source], source.whole(), bucket_bytes=1 << 20)
    returned: list[Any] = []
    version = 0
    with weightsync.SharedMemoryTransport(f"capture-{os.getpid()}", owner=True) as transport:
        publisher = weightsync.Publisher(plan, model, transport)
        async with await VllmEngine.start(arguments, timeout_s=START_S) as engine:
            await into_vllm.attach(engine.llm, plan, transport, timeout_s=HANG_S)

            async def generate(prompt, **options):
                salt = cache_salt(version)
                (made,) = await engine.generate(prompt, cache_salt=salt, **options)
                returned.append(made)
                return made

            async def update():
                nonlocal version
                version += 1
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
                sent = await asyncio.to_thread(publisher.publish, version, timeout_s=HANG_S)
                await into_vllm.update(engine.llm, sent, in_flight="continue", timeout_s=HANG_S)

            bounds = CaptureBounds(timeout_s=120)
            async with (
                CaptureServer(generate, template(), bounds=bounds) as server,
                server.session(prompt_id="p") as session,
            ):
                said = await _agent(session, update)
    fields = ("prompt", "token_ids", "logprobs", "versions", "routed_experts", "finish_reason")
    return {
        "returned": [{name: getattr(made, name) for name in fields} for made in returned],
        "turns": [(str(t.continuity), t.matched) for t in session.conversation.turns],
        "rollouts": [
            {
                "tokens": rollout.tokens,
                "logprobs": rollout.logprobs,
                "versions": rollout.versions,
                "loss_mask": rollout.loss_mask,
                "rows": rollout.attachments["routed_experts"].value,
            }
            for rollout in session.rollouts()
        ],
        "said": said,
    }


async def _agent(session: Any, update: Any) -> list:
    """Talk, with new weights before every other turn."""
    import openai

    said, messages = [], [{"role": "user", "content": "Begin."}]
    ask: dict[str, Any] = {"model": "m", "messages": messages, "tools": [ADD]}
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
        for turn in range(TURNS):
            if turn % 2:
                await update()
            if turn % 3 == 1:
                stream = await client.chat.completions.create(
                    **ask, max_tokens=9, seed=turn, stream=True
                )
                deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
                said.append("".join(deltas))
            else:
                made = await client.chat.completions.create(**ask, max_tokens=12, seed=turn)
                said.append(made.choices[0].message.content)
            messages += [
                {"role": "assistant", "content": said[-1]},
                {"role": "user", "content": f"Go on, {turn}."},
            ]
    return said


def test_the_rollout_is_what_the_engine_returned(facts):
    (rollout,) = facts["rollouts"]
    returned = facts["returned"]
    assert [made["prompt"] for made in returned[1:]] == [
        (*made["prompt"], *made["token_ids"], *later["prompt"][matched:])
        for made, later, (_, matched) in zip(
            returned[:-1], returned[1:], facts["turns"][1:], strict=True
        )
    ]
    assert [continuity for continuity, _ in facts["turns"]] == ["start", *["clean"] * (TURNS - 1)]
    last = returned[-1]
    assert rollout["tokens"].tolist() == [*last["prompt"], *last["token_ids"]]
    start = len(returned[0]["prompt"])
    mask = np.zeros(len(rollout["tokens"]) - start, bool)
    rows = returned[0]["routed_experts"]
    for made in returned:
        at = len(made["prompt"]) - start
        where = slice(at, at + len(made["token_ids"]))
        mask[where] = True
        assert rollout["logprobs"][where].tolist() == list(made["logprobs"])
        assert rollout["versions"][where].tolist() == made["versions"].tolist()
        rows = np.concatenate([rows, made["routed_experts"][len(rows) :]])
    np.testing.assert_array_equal(rollout["loss_mask"], mask)
    np.testing.assert_array_equal(rollout["rows"], rows)
    assert rows.shape == (len(rollout["tokens"]) - 1, SIZES["num_layers"], SIZES["top_k"])
    assert len(np.unique(rows)) == SIZES["num_experts"]
    assert {*rollout["versions"][mask].tolist()} == {0, 1, 2}


def test_the_agent_reads_what_was_sampled(facts):
    for text, made in zip(facts["said"], facts["returned"], strict=True):
        ids = [*made["token_ids"]]
        ended = ids[-1] in template().stop_token_ids
        assert template().parse(ids[:-1] if ended else ids, calls=True) == (text, [])
