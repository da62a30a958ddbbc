"""Routes that a real vLLM captured in bfloat16 are worth imposing, and take the bytes planned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeblocks.replay import compare, impose, measure_mismatch, record
from primeblocks.replay.adapters.vllm import RouterShape, engine_args, plan_capture_bytes
from primeblocks.testing import tiny_models
from tests.engine_job import KV_BYTES, call
from tests.replay.vllm_served import PAGE_TOKENS, logprobs_of, sampling, served

PAGES = 64
SHAPE = RouterShape(num_layers=8, moe_layers=tuple(range(8)), num_experts=32, top_k=4)
SIZES = {"num_layers": 8, "hidden": 256, "num_experts": 32, "top_k": 4, "vocab": 2048}

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "model"
    return tiny_models.save("qwen3_moe", path, dtype="bfloat16", init_std=0.06, **SIZES)


@pytest.fixture(scope="module")
def seen(model: Path) -> dict[str, Any]:
    return call(_serve, model)


def _serve(model: Path) -> dict[str, Any]:
    import vllm

    max_bytes = plan_capture_bytes(SHAPE, page_tokens=PAGE_TOKENS, device_pages=PAGES)
    engine = vllm.LLM(
        str(model),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=PAGES,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        **engine_args(max_bytes=max_bytes, device="cpu"),
    )
    asked = np.random.default_rng(0).integers(4, 2048, (16, 32)).tolist()
    texts = [{"prompt_token_ids": ids} for ids in asked]
    answers = engine.generate(texts, sampling(128, seed=1), use_tqdm=False)
    store = engine.collective_rpc(lambda worker: worker.model_runner.aux_output_connector._store)[0]
    allotted = (store._store.object_nbytes, store._store.num_slots)
    engine.llm_engine.engine_core.shutdown()
    assert store._closed  # the plug-in closes it with the runner
    return {"requests": served(answers, SHAPE), "allotted": allotted}


def test_planned_bytes_are_what_the_engine_allots(seen):
    """A page of rows is as large as planned, and as many fit."""
    assert seen["allotted"] == (PAGE_TOKENS * SHAPE.bytes_per_token, PAGES)


def test_replay_lowers_the_mismatch_in_bfloat16(model, seen):
    """8 layers of 32 experts, top 4: a fifth of the routings differ; imposing them removes nearly
    all of the mismatch (docs/replay_evidence.md has more seeds and other settings)."""
    from transformers import AutoModelForCausalLM

    from primeblocks.replay.adapters.transformers import routers

    widened = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    without, with_replay, rollouts, agreements = [], [], [], []
    for tokens, rollout, _, routes in seen["requests"]:
        rollouts.append(torch.from_numpy(rollout))
        with torch.no_grad(), record(routers(widened)) as tape:
            without.append(logprobs_of(widened, tokens)[-len(rollout) :])
        with torch.no_grad(), impose(routers(widened), routes):
            with_replay.append(logprobs_of(widened, tokens)[-len(rollout) :])
        agreements.append(compare(routes, tape.routes).overall)
    rollout = torch.cat(rollouts)
    before = measure_mismatch(trainer_logprobs=torch.cat(without), rollout_logprobs=rollout)
    after = measure_mismatch(trainer_logprobs=torch.cat(with_replay), rollout_logprobs=rollout)
    assert before.tokens == 2048
    assert 0.5 < np.mean(agreements) < 0.95
    print(f"k3 {before.k3:.2e} without, {after.k3:.2e} with replay")
    assert after.k3 < before.k3 / 50
    assert after.ratio_tail < before.ratio_tail
