"""Run by test_capacity_vllm.py in its own process: `vllm_capacity_job.py CASES RESULTS`.

For each case of the JSON file CASES, a checkpoint, a number of pages and requests, it starts an
engine and writes to RESULTS what vLLM says about its cache: the bytes of a page of each layer, the
layers that share a page table, the bytes of the pool, and how often a running request was evicted.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

PAGE_TOKENS = 32


def start(model: str, pages: int) -> Any:
    import vllm

    return vllm.LLM(
        model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=pages,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
    )


def accounting(engine: Any) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    core = engine.llm_engine.engine_core.engine_core
    cache = core.scheduler.kv_cache_config
    return {
        "pages": cache.num_blocks,
        "groups": [
            {
                "layers": len(group.layer_names),
                "kind": type(group.kv_cache_spec).__name__,
                "page_bytes": [
                    each.page_size_bytes for each in iter_layer_specs(group.kv_cache_spec)
                ],
                "page_tokens": group.kv_cache_spec.block_size,
            }
            for group in cache.kv_cache_groups
        ],
        "pool_bytes": max(each.size for each in cache.kv_cache_tensors),
        "tensors": len(cache.kv_cache_tensors),
    }


def evictions(engine: Any, requests: dict[str, int]) -> int:
    """Run all requests at once, each prompt of other tokens. How often one was evicted."""
    import vllm

    ids = [[5 + number] * requests["prompt_tokens"] for number in range(requests["prompts"])]
    prompts = [{"prompt_token_ids": each} for each in ids]
    sampling = vllm.SamplingParams(
        n=requests["samples"],
        max_tokens=requests["completion_tokens"],
        temperature=1.0,
        ignore_eos=True,
        detokenize=False,
    )
    engine.generate(prompts, sampling, use_tqdm=False)
    counted = [each for each in engine.get_metrics() if each.name == "vllm:num_preemptions"]
    return sum(each.value for each in counted)


def run(case: dict[str, Any]) -> dict[str, Any]:
    engine = start(case["model"], case["pages"])
    found = accounting(engine)
    found["evictions"] = evictions(engine, case["requests"])
    engine.llm_engine.engine_core.shutdown()
    return found


def main(cases: Path, results: Path) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    found = []
    for case in json.loads(cases.read_text()):
        found.append(run(case))
        gc.collect()
        cleanup_dist_env_and_memory()
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
