"""Run by test_vllm_store.py in its own process: `vllm_store_job.py FOLDER`.

Reads the checkpoint FOLDER/model and writes FOLDER/results.json: for each phase the generated
tokens, log-probabilities, cached prompt tokens and a digest of the captured routes of each request,
and the store's statistics. The engine's cache and vLLM's own pool are far smaller than the prompts.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

PAGE_TOKENS = 32
PROMPT = 100  # three whole pages
PAGE_BYTES = 4 * 2 * 2 * 32 * PAGE_TOKENS * 4  # layers, k and v, heads, width, tokens, float32


def start(folder: Path) -> Any:
    import vllm

    from primeblocks.kvoffload.adapters.vllm import engine_args

    return vllm.LLM(
        str(folder / "model"),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=32,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=True,
        aux_output_config={"max_bytes": 64 << 20},
        **engine_args(
            primary_bytes=24 * PAGE_BYTES,
            host_bytes=8 * PAGE_BYTES,
            disk_path=folder / "pages",
            disk_bytes=1024 * PAGE_BYTES,
            max_staleness=1,
        ),
    )


class Phases:
    """Runs prompts on one engine and writes down what came of them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.results: dict[str, Any] = {}

    def run(self, name: str, prompts: list[list[int]], *, version: int) -> None:
        import vllm

        from primeblocks.kvoffload.adapters.vllm import engine_statistics, request_args

        parameters = vllm.SamplingParams(
            max_tokens=16,
            temperature=0.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            extra_args=request_args(version),
        )
        salted = [{"prompt_token_ids": ids, "cache_salt": f"run/{version}"} for ids in prompts]
        requests = self.engine.generate(salted, parameters, use_tqdm=False)
        self.results[name] = {
            "requests": [self.describe(request) for request in requests],
            "statistics": dataclasses.asdict(engine_statistics()),
        }

    @staticmethod
    def describe(request: Any) -> dict[str, Any]:
        output = request.outputs[0]
        chosen = zip(output.logprobs, output.token_ids, strict=True)
        return {
            "tokens": list(output.token_ids),
            "logprobs": [at[token].logprob for at, token in chosen],
            "cached": request.num_cached_tokens,
            "routes": hashlib.sha256(np.ascontiguousarray(output.routed_experts)).hexdigest(),
        }


def plant(folder: Path) -> None:
    """Leave a page behind, as an engine that was killed does."""
    from primeblocks.kvoffload import DiskTier, PageKey, Record
    from primeblocks.kvoffload.page import checksum

    path = folder / "pages" / "engine-0"
    disk = DiskTier(path, capacity_bytes=PAGE_BYTES, page_bytes=PAGE_BYTES)
    key, page = PageKey("0", b"old"), np.zeros(PAGE_BYTES, np.uint8)
    assert disk.put([Record(key, page, checksum(key, page))]) == [None]
    disk.close()


def bytes_in(folder: Path) -> int:
    return (folder / "pages" / "engine-0" / "pages").stat().st_size


def corrupt(folder: Path) -> int:
    """Change one bit of every page on disk."""
    file = folder / "pages" / "engine-0" / "pages"
    content = np.fromfile(file, np.uint8)
    content[PAGE_BYTES // 2 :: PAGE_BYTES] ^= 1
    content.tofile(file)
    return len(content) // PAGE_BYTES


def main(folder: Path) -> None:
    generator = np.random.default_rng(0)
    asked, flood = (generator.integers(4, 512, (n, PROMPT)).tolist() for n in (6, 20))
    plant(folder)
    planted = bytes_in(folder)
    engine = start(folder)
    phases = Phases(engine)
    phases.results |= {"planted": planted, "adopted": bytes_in(folder)}
    engine_id = engine.llm_engine.vllm_config.kv_transfer_config.engine_id
    pools = [each.name for each in Path("/dev/shm").glob(f"vllm_offload_{engine_id}*")]
    for version in range(3):
        phases.run(f"cold {version}", asked, version=version)
        phases.run(f"flood {version}", flood, version=version)
        phases.run(f"warm {version}", asked, version=version)
    phases.run("flood again", flood, version=2)
    phases.results["corrupted"] = corrupt(folder)
    phases.run("damaged", asked, version=2)
    phases.run("flood a last time", flood, version=2)
    phases.run("repaired", asked, version=2)
    assert engine.reset_prefix_cache(reset_connector=True)
    phases.run("reset", asked, version=2)
    engine.llm_engine.engine_core.shutdown()
    phases.results["left"] = bytes_in(folder)
    phases.results["pools"] = pools
    (folder / "results.json").write_text(json.dumps(phases.results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
