"""Run by test_vllm_versions.py in its own process: `vllm_versions_job.py FOLDER VERSIONS`.

Trains, as far as the engine can see: loads the checkpoints FOLDER/model-0, 1 ... one after another
into one engine with our tiers in host memory and on disk behind it, capture on, and room for the
routes of the engine's own pages only. In each version, rollouts ask, others flood all caches, the
rollouts ask the same again, others flood again, and they take a second turn, their last. Writes to
FOLDER/results.json what came of each version, what the last weights say in an engine without tiers,
and what comes of an update without a new salt.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

PAGE_TOKENS, ENGINE_PAGES = 32, 32
LAYERS, TOP_K = 4, 2
PROMPT, ANSWER, TOOL, WHOLE = 100, 16, 24, 128
ROLLOUTS, CROWD = 6, 20
PAGE_BYTES = LAYERS * 2 * 2 * 32 * PAGE_TOKENS * 4  # k and v, heads, width, tokens, float32
ROUTES_BYTES = LAYERS * TOP_K
FRAME_BYTES = PAGE_BYTES + 4096  # a page, its routes, and what rounding adds
POOL_PAGES, HOST_PAGES, DISK_PAGES = 40, 16, 160


def start(folder: Path, **tiers: Any) -> Any:
    import vllm

    return vllm.LLM(
        str(folder / "model-0"),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=ENGINE_PAGES,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=True,
        aux_output_config={"max_bytes": ENGINE_PAGES * PAGE_TOKENS * ROUTES_BYTES},
        **tiers,
    )


def tiers(folder: Path) -> dict[str, Any]:
    from primeblocks.kvoffload.adapters.vllm import engine_args

    return engine_args(
        primary_bytes=POOL_PAGES * FRAME_BYTES,
        host_bytes=HOST_PAGES * FRAME_BYTES,
        disk_path=folder / "pages",
        disk_bytes=DISK_PAGES * FRAME_BYTES,
        max_staleness=1,
        routes_bytes_per_token=ROUTES_BYTES,
    )


def load(engine: Any, folder: Path, version: int) -> None:
    path = str(folder / f"model-{version}")
    engine.collective_rpc("reload_weights", kwargs={"weights_path": path})


def generate(
    engine: Any, prompts: list[list[int]], *, salt: str, said: list[dict[str, Any]]
) -> list[Any]:
    import vllm

    parameters = [
        vllm.SamplingParams(
            max_tokens=ANSWER,
            temperature=0.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            extra_args=each,
        )
        for each in said
    ]
    salted = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts]
    return engine.generate(salted, parameters, use_tqdm=False)


def describe(request: Any) -> dict[str, Any]:
    output = request.outputs[0]
    chosen = zip(output.logprobs, output.token_ids, strict=True)
    missing = (output.routed_experts == 0xFF).all(axis=(1, 2))
    return {
        "tokens": list(output.token_ids),
        "logprobs": [at[token].logprob for at, token in chosen],
        "cached": request.num_cached_tokens,
        "routes": hashlib.sha256(np.ascontiguousarray(output.routed_experts)).hexdigest(),
        "missing_routes": int(missing.sum()),
    }


def bytes_on_disk(folder: Path) -> dict[str, int]:
    files = [each for each in (folder / "pages").rglob("*") if each.is_file()]
    # Blocks hold what the file system notes of a file in pieces, too; a size counts holes.
    stats = {each.name: each.stat() for each in files}
    return {name: min(each.st_size, each.st_blocks * 512) for name, each in stats.items()}


class Run:
    """One engine, and what came of its requests."""

    def __init__(self, folder: Path, engine: Any) -> None:
        generator = np.random.default_rng(0)
        self.folder, self.engine = folder, engine
        self.asked = generator.integers(4, 512, (ROLLOUTS, PROMPT)).tolist()
        self.crowds = generator.integers(4, 512, (2, CROWD, PROMPT)).tolist()
        self.tool = generator.integers(4, 512, (ROLLOUTS, TOOL)).tolist()
        self.whole = generator.integers(4, 512, (ROLLOUTS, WHOLE)).tolist()

    def version(self, version: int, *, salt: str) -> dict[str, Any]:
        from primeblocks.kvoffload.adapters.vllm import engine_statistics, request_args

        names = [f"{salt}/{index}" for index in range(ROLLOUTS)]
        first = [request_args(version, rollout=name) for name in names]
        cold = generate(self.engine, self.asked, salt=salt, said=first)
        generate(self.engine, self.crowds[0], salt=salt, said=[request_args(version)] * CROWD)
        before = engine_statistics()
        warm = generate(self.engine, self.asked, salt=salt, said=first)
        grown = [
            prompt + list(request.outputs[0].token_ids) + tool
            for prompt, request, tool in zip(self.asked, warm, self.tool, strict=True)
        ]
        generate(self.engine, self.crowds[1], salt=salt, said=[request_args(version)] * CROWD)
        between = engine_statistics()
        last = [request_args(version, rollout=name, ends=[name]) for name in names]
        turn = generate(self.engine, grown, salt=salt, said=last)
        after = engine_statistics()
        return {
            "cold": [describe(request) for request in cold],
            "warm": [describe(request) for request in warm],
            "turn": [describe(request) for request in turn],
            "warm_hits": [between.hits - before.hits, between.tokens - before.tokens],
            "turn_hits": [after.hits - between.hits, after.tokens - between.tokens],
            "tiers": dataclasses.asdict(after)["tiers"],
            "disk_bytes": bytes_on_disk(self.folder),
        }


def whole_pages(run: Run, version: int) -> list[list[dict[str, Any]]]:
    """Prompts of whole pages, first computed, then out of the tiers to the last page."""
    from primeblocks.kvoffload.adapters.vllm import request_args

    salt, said = f"run/{version}", [request_args(version)] * CROWD
    found = []
    for asked in (run.whole, run.crowds[0], run.whole):
        answers = generate(run.engine, asked, salt=salt, said=said[: len(asked)])
        found.append([describe(answer) for answer in answers])
    return [found[0], found[2]]


def main(folder: Path, versions: int) -> None:
    from primeblocks.kvoffload.adapters.vllm import request_args

    engine = start(folder, **tiers(folder))
    run = Run(folder, engine)
    results: dict[str, Any] = {"versions": []}
    for version in range(versions):
        load(engine, folder, version)
        results["versions"].append(run.version(version, salt=f"run/{version}"))
    results["whole"] = whole_pages(run, versions - 1)
    load(engine, folder, 0)
    # With the new version's salt, and what goes wrong without: the comparisons must notice it.
    for name, version in (("salted", versions), ("unsalted", versions - 1)):
        said = [request_args(version)] * ROLLOUTS
        answers = generate(engine, run.whole, salt=f"run/{version}", said=said)
        results[name] = [describe(answer) for answer in answers]
    engine.llm_engine.engine_core.shutdown()
    fresh = start(folder)
    load(fresh, folder, versions - 1)
    said = generate(fresh, run.asked, salt="fresh", said=[{}] * ROLLOUTS)
    results["fresh"] = [describe(request) for request in said]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
