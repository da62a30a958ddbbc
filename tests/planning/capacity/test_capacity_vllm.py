"""plan_capacity against vLLM's own accounting, and against when its scheduler really evicts."""

import dataclasses

import pytest

from primeblocks.planning.capacity import Gpu, Rollouts, Weights, kv_groups, plan_capacity
from primeblocks.testing import tiny_models
from tests.engine_job import KV_BYTES, call

QUICK = "exaone_moe"  # the others with --full
PAGE_TOKENS = {"qwen3_moe": 32, "exaone_moe": 32, "deepseek_v3": 16}
# Six pages of 32 a rollout, or a window of four that slides; one of the prompt's is shared.
SHARED = Rollouts(prompts=2, prompt_tokens=40, completion_tokens=153, samples=2)
# vLLM does not cache prefixes of latents on CPU, so nothing is shared.
ASKED = {
    "qwen3_moe": SHARED,
    "exaone_moe": SHARED,
    "deepseek_v3": dataclasses.replace(SHARED, prompts=4, samples=1),
}

pytestmark = pytest.mark.vllm


def plan(family):
    groups = kv_groups(tiny_models.config(family), kv_dtype="float32")
    how = {"gpu": Gpu(1 << 30, reserve_bytes=0), "weights": Weights(0), "gpus": 1}
    return plan_capacity(groups, [ASKED[family]], page_tokens=PAGE_TOKENS[family], **how)


def layers_a_page(family):
    """vLLM splits groups into parts of as many layers as the smallest has; a page is of a part."""
    return min(group.layers for group in plan(family).groups)


def vllm_pages(family):
    found = plan(family)
    parts = [group.layers // layers_a_page(family) for group in found.groups]
    return sum(map(int.__mul__, parts, found.pages))


@pytest.fixture(scope="module", params=PAGE_TOKENS)
def engine(request, tmp_path_factory):
    """Of a family, and what an engine says with just enough pages."""
    family = request.param
    if family != QUICK and not request.config.getoption("--full"):
        pytest.skip(f"an engine of {family} starts with --full")
    path = tmp_path_factory.mktemp("capacity") / family
    tiny_models.save(family, path, dtype="float32")
    # vLLM keeps page 0 for itself.
    return family, call(_fill, str(path), vllm_pages(family) + 1, ASKED[family])


def _fill(model, pages, asked):
    """What vLLM says about its cache, and evictions with all its pages and with one less."""
    import vllm

    engine = vllm.LLM(
        model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        block_size=32,
        num_gpu_blocks_override=pages,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
    )
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    saw = _accounting(scheduler.kv_cache_config)
    saw["enough"] = _evictions(engine, asked)
    assert engine.reset_prefix_cache()
    (taken,) = scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    saw["less"] = _evictions(engine, asked) - saw["enough"]
    scheduler.kv_cache_manager.block_pool.free_blocks([taken])
    return saw


def _accounting(cache):
    """The bytes of a page of each layer, the layers that share a page table, and the pool."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return {
        "pages": cache.num_blocks,
        "groups": [
            {
                "layers": len(group.layer_names),
                "page_bytes": {
                    each.page_size_bytes for each in iter_layer_specs(group.kv_cache_spec)
                },
                "page_tokens": group.kv_cache_spec.block_size,
            }
            for group in cache.kv_cache_groups
        ],
        "pool_bytes": max(each.size for each in cache.kv_cache_tensors),
    }


def _evictions(engine, asked):
    """Run all requests at once, each prompt of other tokens. How often one was evicted so far."""
    import vllm

    ids = [[5 + number] * asked.prompt_tokens for number in range(asked.prompts)]
    sampling = vllm.SamplingParams(
        n=asked.samples,
        max_tokens=asked.completion_tokens,
        temperature=1.0,
        ignore_eos=True,
        detokenize=False,
    )
    engine.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)
    counted = [each for each in engine.get_metrics() if each.name == "vllm:num_preemptions"]
    return sum(each.value for each in counted)


def test_a_page_has_the_bytes_that_vllm_says(engine):
    family, found = engine
    ours, tokens = plan(family).groups, PAGE_TOKENS[family]
    assert sum(each["layers"] for each in found["groups"]) == sum(each.layers for each in ours)
    (layer,) = {each.page_bytes(tokens) // each.layers for each in ours}
    for group in found["groups"]:
        assert group["page_bytes"] == {layer}
        assert group["page_tokens"] == tokens
        assert group["layers"] == layers_a_page(family)
    assert found["pool_bytes"] == found["pages"] * layer * layers_a_page(family)


def test_vllm_evicts_nothing_with_the_planned_pages_and_something_with_one_less(engine):
    assert engine[1]["enough"] == 0
    assert engine[1]["less"] > 0
