"""Routes that a real vLLM captured while drafts were rejected, against transformers' own choices.

A step computes the drafts before it knows which of them stand: rows of rejected ones must go, and
those of tokens after them are written where they were.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from primeblocks.replay import record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.adapters.vllm import engine_args, plan_capture_bytes
from primeblocks.testing import tiny_models
from tests.engine_job import KV_BYTES, call
from tests.replay.vllm_served import (
    EXACT,
    PAGE_TOKENS,
    Served,
    logprobs_of,
    sampling,
    served,
    tokens_of,
)

PAGES, WORDS, SPECIAL = 16, 8, 4
DRAFTS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}

pytestmark = pytest.mark.vllm


class Seen(NamedTuple):
    """What came of requests, and the drafts of all of them: of the engine, and of completions."""

    requests: list[Served]
    drafts: int
    accepted: int
    draft_tokens: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with few words, so that drafts of a layer without training are accepted at times."""
    path = tmp_path_factory.mktemp("speculation") / "model"
    vocab = SPECIAL + WORDS
    tiny_models.save("glm4_moe", path, seed=0, dtype="float32", init_std=0.06, vocab=vocab)
    _add_drafting_layer(path)
    return path


def _add_drafting_layer(path: Path) -> None:
    """Put a layer that drafts behind the last one: a copy of it, and a projection."""
    weights, layers = load_file(path / "model.safetensors"), EXACT.num_layers
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in weights if name.startswith(last)]:
        weights[name.replace(last, own)] = weights[name].clone()
    hidden = weights["model.norm.weight"].shape[0]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{own}{name}.weight"] = torch.ones(hidden)
    halves = torch.eye(hidden).repeat(1, 2) / 2  # of the embedding and of the hidden state
    weights[f"{own}eh_proj.weight"] = halves.contiguous()
    weights[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{own}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


@pytest.fixture(scope="module", params=METHODS)
def seen(request: Any, folder: Path) -> Seen:
    if request.param == "ngram" and not request.config.getoption("--full"):
        pytest.skip("a second engine, for n-grams: --full")
    return Seen(*call(_serve, folder, METHODS[request.param]))


def _serve(folder: Path, speculation: dict[str, Any]) -> tuple[list[Served], int, int, list[int]]:
    """Prompts, what flushes them out of the engine's cache, and the prompts with their answers."""
    import vllm

    from primeblocks.async_loop.adapters.vllm.completion import completion_of
    from primeblocks.kvoffload.adapters.vllm import engine_args as tiers

    max_bytes = plan_capture_bytes(EXACT, page_tokens=PAGE_TOKENS, device_pages=PAGES)
    engine = vllm.LLM(
        str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=PAGES,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=speculation,
        per_request_spec_decode_metrics="summary",
        **engine_args(max_bytes=max_bytes, device="cpu"),
        **tiers(
            primary_bytes=1 << 20, host_bytes=1 << 24, routes_bytes_per_token=EXACT.bytes_per_token
        ),
    )
    generator = np.random.default_rng(0)

    def ask(texts: list[list[int]], temperature: float) -> list[Any]:
        prompts: list[Any] = [{"prompt_token_ids": ids, "cache_salt": "v0"} for ids in texts]
        asked = sampling(24, temperature=temperature)
        return engine.generate(prompts, asked, use_tqdm=False)

    def draw(count: int) -> list[list[int]]:
        return generator.integers(SPECIAL, SPECIAL + WORDS, (count, 70)).tolist()

    first = ask(draw(4), 1.0)
    between = ask(draw(6), 0.0)
    again = ask([tokens_of(request) for request in first], 1.0)
    counts = {metric.name: metric.value for metric in engine.get_metrics() if "spec" in metric.name
              and hasattr(metric, "value")}  # fmt: skip
    engine.llm_engine.engine_core.shutdown()
    requests = first + between + again
    completions = [
        completion_of((0,), request.outputs[0], num_cached_tokens=0, version=0)
        for request in requests
    ]
    kept = [each.to_rollout().attachments["draft_tokens"] for each in completions]
    return served(requests), counts[DRAFTS], counts[ACCEPTED], sum(kept).tolist()


def test_routes_under_rejected_drafts_are_those_of_the_tokens(seen, folder):
    """Chunked prefill, an engine cache that is flushed, our tiers, drafts accepted and rejected."""
    from transformers import AutoModelForCausalLM

    assert 0 < seen.accepted < seen.drafts
    assert seen.draft_tokens == [seen.accepted, seen.drafts]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    cached = [request.cached for request in seen.requests[-4:]]
    assert min(cached) >= 2 * PAGE_TOKENS  # from our tiers, in part
    for tokens, logprobs, _, routes in seen.requests:
        with torch.no_grad(), record(routers(model)) as tape:
            expected = logprobs_of(model, tokens)[-len(logprobs) :]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=0)
        assert routes.missing.nonzero()[0].tolist() == [len(tokens) - 1]
        np.testing.assert_array_equal(
            np.sort(routes.experts[:-1]), np.sort(tape.routes.experts[:-1])
        )
