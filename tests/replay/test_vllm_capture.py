"""Routes that a real vLLM captured, against transformers: exact in float32, and worth imposing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeblocks.replay import compare, impose, measure_mismatch, record
from primeblocks.replay.adapters.vllm import (
    RouterShape,
    engine_args,
    plan_capture_bytes,
    routes_from_base64,
)
from primeblocks.testing import tiny_models
from tests.engine_job import call
from tests.replay.vllm_served import (
    EXACT,
    PAGE_TOKENS,
    Served,
    prompts,
    sampling,
    served,
    tokens_of,
)

PAGES = 64
CHUNK = 64  # tokens of one step: longer prompts are prefilled in several
PROMPT_START = 20
BF16 = RouterShape(num_layers=8, moe_layers=tuple(range(8)), num_experts=32, top_k=4)
EXACT_K3 = 1e-11

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture")
    tiny_models.save("glm4_moe", folder / "exact", dtype="float32", init_std=0.08)
    sizes = {"num_layers": 8, "hidden": 256, "num_experts": 32, "top_k": 4, "vocab": 2048}
    tiny_models.save("qwen3_moe", folder / "bf16", dtype="bfloat16", init_std=0.06, **sizes)
    return folder


@pytest.fixture(scope="module")
def exact(models: Path) -> dict[str, Any]:
    return call(_serve_exact, models / "exact")


@pytest.fixture(scope="module")
def bf16(models: Path) -> list[Served]:
    return call(_serve_bf16, models / "bf16")


def _serve_exact(model: Path) -> dict[str, Any]:
    from vllm.utils.serial_utils import numpy2base64

    generator = np.random.default_rng(0)
    engine = _start(model, EXACT, dtype="float32", chunk=CHUNK)
    short, long = prompts(generator, 4, 40), prompts(generator, 3, 150)
    plain, chunked = _sample(engine, short), _sample(engine, long)
    turns = [tokens_of(request) + prompts(generator, 1, 20)[0] for request in chunked]
    late = _sample(engine, short, routed_experts_prompt_start=PROMPT_START)
    sent = numpy2base64(plain[0].outputs[0].routed_experts)
    store = engine.collective_rpc(lambda worker: worker.model_runner.aux_output_connector._store)[0]
    saw = {
        "plain": served(plain),
        "chunked": served(chunked),
        "prefix_hit": served(_sample(engine, turns)),
        "prompt_start": served(late, start=PROMPT_START),
        "http": routes_from_base64(sent, EXACT, tokens=len(tokens_of(plain[0]))),
        "store": (store._store.object_nbytes, store._store.num_slots),
    }
    engine.llm_engine.engine_core.shutdown()
    assert store._closed  # the plug-in closes it with the runner
    return saw


def _serve_bf16(model: Path) -> list[Served]:
    engine = _start(model, BF16, dtype="bfloat16", chunk=512)
    asked = np.random.default_rng(0).integers(4, 2048, (16, 32)).tolist()
    return served(_sample(engine, asked, tokens=128, seed=1), BF16)


def _start(model: Path, shape: RouterShape, *, dtype: str, chunk: int) -> Any:
    import vllm

    max_bytes = plan_capture_bytes(shape, page_tokens=PAGE_TOKENS, device_pages=PAGES)
    return vllm.LLM(
        str(model),
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=chunk,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=PAGES,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        **engine_args(max_bytes=max_bytes, device="cpu"),
    )


def _sample(engine: Any, asked: list[list[int]], *, tokens: int = 24, **settings: Any) -> list[Any]:
    texts = [{"prompt_token_ids": ids} for ids in asked]
    return engine.generate(texts, sampling(tokens, **settings), use_tqdm=False)


def load(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """log p(token | tokens before it), for every token but the first."""
    ids = torch.from_numpy(tokens)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("case", ["plain", "chunked", "prefix_hit", "prompt_start"])
def test_captured_routes_equal_a_recomputation(models, exact, case):
    """float32: every (token, layer) pair, cached positions included."""
    from primeblocks.replay.adapters.transformers import routers

    model = load(models / "exact", torch.float32)
    assert exact[case]
    k3 = []
    for tokens, rollout, cached, routes in exact[case]:
        with record(routers(model)) as tape:
            trainer = logprobs_of(model, tokens)[-len(rollout) :]
        before = PROMPT_START if case == "prompt_start" else 0
        assert routes.missing.nonzero()[0].tolist() == [*range(before), len(tokens) - 1]
        agreement = compare(routes, tape.routes)
        assert agreement.tokens == len(tokens) - 1 - before
        assert agreement.by_layer == {1: 1.0, 2: 1.0, 3: 1.0}
        k3.append(measure_mismatch(trainer_logprobs=trainer, rollout_logprobs=rollout).k3)
        assert (cached > 0) == (case in {"prefix_hit", "prompt_start"})
    assert max(k3) < EXACT_K3


def test_http_encoding_of_vllm_is_read(exact):
    assert exact["http"] == exact["plain"][0].routes


def test_planned_bytes_are_what_the_engine_allots(exact):
    """A page of rows is as large as planned, and as many fit."""
    assert exact["store"] == (PAGE_TOKENS * EXACT.bytes_per_token, PAGES)


def test_replay_lowers_the_mismatch_in_bfloat16(models, bf16):
    """8 layers of 32 experts, top 4: a fifth of the routings differ; imposing them removes nearly
    all of the mismatch (docs/replay_factor.md has more seeds and other settings)."""
    from primeblocks.replay.adapters.transformers import routers

    model = load(models / "bf16", torch.float32)  # the same weights, widened
    without, with_replay, rollouts, agreements = [], [], [], []
    for tokens, rollout, _, routes in bf16:
        rollouts.append(torch.from_numpy(rollout))
        with torch.no_grad(), record(routers(model)) as tape:
            without.append(logprobs_of(model, tokens)[-len(rollout) :])
        with torch.no_grad(), impose(routers(model), routes):
            with_replay.append(logprobs_of(model, tokens)[-len(rollout) :])
        agreements.append(compare(routes, tape.routes).overall)
    rollout = torch.cat(rollouts)
    before = measure_mismatch(trainer_logprobs=torch.cat(without), rollout_logprobs=rollout)
    after = measure_mismatch(trainer_logprobs=torch.cat(with_replay), rollout_logprobs=rollout)
    assert before.tokens == 2048
    assert 0.5 < np.mean(agreements) < 0.95
    print(f"k3 {before.k3:.2e} without, {after.k3:.2e} with replay")
    assert after.k3 < before.k3 / 50
    assert after.ratio_tail < before.ratio_tail
