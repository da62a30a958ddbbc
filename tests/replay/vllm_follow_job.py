"""Run by test_vllm_follow.py in a process of its own: `vllm_follow_job.py CASE FOLDER`.

Reads the checkpoints FOLDER/exact and FOLDER/exact-1 (the next policy), writes FOLDER/CASE.npz: for
each phase what `vllm_capture_job.save` writes, and the counts that show that it really happened.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm_capture_job import EXACT, PAGE_TOKENS, save, tokens_of

from primeblocks.replay.adapters.vllm import engine_args, plan_capture_bytes

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "block_size": PAGE_TOKENS,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": False,
}
PAGES = 20  # 640 tokens, fewer than the requests in flight need
TIMEOUT_S = 60.0


NUCLEUS = {"temperature": 0.7, "top_k": 40, "top_p": 0.9}


def sampling(tokens: int, **settings: Any) -> Any:
    import vllm

    settings = {"temperature": 1.0} | settings
    return vllm.SamplingParams(
        max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False, **settings
    )


def prompts(generator: np.random.Generator, count: int, length: int) -> list[list[int]]:
    return generator.integers(4, 512, (count, length)).tolist()


class Flight:
    """An engine whose requests are disturbed while they run."""

    def __init__(self, folder: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        max_bytes = plan_capture_bytes(EXACT, page_tokens=PAGE_TOKENS, device_pages=PAGES)
        capture = engine_args(max_bytes=max_bytes, device="cpu")
        arguments = AsyncEngineArgs(
            str(folder / "exact"), num_gpu_blocks_override=PAGES, **ENGINE, **capture
        )
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.progress: dict[str, int] = {}
        self.moved = asyncio.Condition()

    async def one(self, name: str, ids: list[int], tokens: int, salt: str) -> Any:
        output = None
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        async for output in self.engine.generate(prompt, sampling(tokens), request_id=name):
            async with self.moved:
                self.progress[name] = len(output.outputs[0].token_ids)
                self.moved.notify_all()
        return output

    async def disturb(
        self,
        case: str,
        texts: list[list[int]],
        tokens: int,
        then: Callable[[list[str]], Awaitable[None]],
    ) -> list[Any]:
        """Run requests; once each has ten tokens, do `then`."""
        names = [f"{case}{i}" for i in range(len(texts))]
        tasks = [
            asyncio.create_task(self.one(name, ids, tokens, "0"))
            for name, ids in zip(names, texts, strict=True)
        ]
        async with self.moved:
            enough = self.moved.wait_for(
                lambda: all(self.progress.get(name, 0) >= 10 for name in names)
            )
            await asyncio.wait_for(enough, TIMEOUT_S)
        await then(names)
        return await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)


async def fly(folder: Path) -> dict[str, np.ndarray]:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    generator = np.random.default_rng(1)
    flight = Flight(folder)
    engine = flight.engine
    results: dict[str, np.ndarray] = {}

    asked = prompts(generator, 8, 60)
    crowd = [flight.one(f"crowd{i}", ids, 60, "0") for i, ids in enumerate(asked)]
    preempted = await asyncio.wait_for(asyncio.gather(*crowd), TIMEOUT_S)
    save(results, "preempted", preempted, EXACT)
    counts = {metric.name: getattr(metric, "value", 0) for metric in get_metrics_snapshot()}
    results["preemptions"] = np.array(counts["vllm:num_preemptions"])

    async def abort(names: list[str]) -> None:
        for name in names:
            await engine.abort(name)

    aborted = await flight.disturb("aborted", prompts(generator, 3, 40), 150, abort)
    save(results, "aborted", aborted, EXACT)
    results["reasons"] = np.array([request.outputs[0].finish_reason for request in aborted])
    again = [flight.one(f"on{i}", tokens_of(r), 20, "0") for i, r in enumerate(aborted)]
    continued = await asyncio.wait_for(asyncio.gather(*again), TIMEOUT_S)
    save(results, "continued", continued, EXACT)

    async def update(names: list[str]) -> None:
        await engine.pause_generation(mode="keep", clear_cache=False)
        weights = {"weights_path": str(folder / "exact-1")}
        await engine.collective_rpc("reload_weights", kwargs=weights)
        await engine.update_weight_version("1")
        await engine.resume_generation()

    mixed = await flight.disturb("mixed", prompts(generator, 3, 40), 60, update)
    save(results, "mixed", mixed, EXACT)
    starts = [request.outputs[0].weight_versions[-1].start for request in mixed]
    results["switches"] = np.array(starts)
    spans = [len(request.outputs[0].weight_versions) for request in mixed]
    results["spans"] = np.array(spans)
    engine.shutdown()
    return results


def follow(folder: Path) -> dict[str, np.ndarray]:
    """Pages that come back from tiers, and rows that do not."""
    import vllm

    from primeblocks.kvoffload.adapters.vllm import engine_args as offload_args
    from primeblocks.kvoffload.adapters.vllm import request_args

    page_bytes = EXACT.num_layers * 2 * 2 * 32 * PAGE_TOKENS * 4
    rows_of_a_page = PAGE_TOKENS * EXACT.bytes_per_token
    engine = vllm.LLM(
        str(folder / "exact"),
        num_gpu_blocks_override=32,
        **ENGINE,
        # Rows of thirty pages: those in use, and few of the tiers'.
        **engine_args(max_bytes=30 * rows_of_a_page, device="cpu"),
        **offload_args(
            primary_bytes=16 * page_bytes,
            host_bytes=64 * page_bytes,
            disk_path=folder / "pages",
            disk_bytes=1024 * page_bytes,
            max_staleness=1,
        ),
    )
    generator = np.random.default_rng(2)
    asked, flood = prompts(generator, 4, 100), prompts(generator, 24, 100)
    results: dict[str, np.ndarray] = {}

    def run(case: str, texts: list[list[int]], **settings: Any) -> None:
        parameters = sampling(8, **settings)
        parameters.extra_args = request_args(0)
        salted = [{"prompt_token_ids": ids, "cache_salt": "0"} for ids in texts]
        save(results, case, engine.generate(salted, parameters, use_tqdm=False), EXACT)

    run("cold", asked)
    run("warm", asked)
    run("flood", flood)
    run("forgotten", asked)  # KV from the tiers, rows evicted
    run("known again", [ids[:70] + [9] * 30 for ids in asked])  # own rows of new tokens
    assert engine.reset_prefix_cache()  # the tiers keep their pages
    run("reset", flood[:4])
    run("alive", prompts(generator, 2, 50))
    run("nucleus", prompts(generator, 4, 50), **NUCLEUS)
    engine.llm_engine.engine_core.shutdown()
    return results


def hand_over(folder: Path) -> dict[str, np.ndarray]:
    """One engine prefills, another decodes with its KV, which comes through a shared folder."""
    import vllm

    shared = {"shared_storage_path": str(folder / "shared")}
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": shared,
    }
    max_bytes = plan_capture_bytes(EXACT, page_tokens=PAGE_TOKENS, device_pages=32)
    texts = prompts(np.random.default_rng(3), 3, 100)
    results: dict[str, np.ndarray] = {}
    for case, tokens in (("prefill", 1), ("decode", 24)):
        engine = vllm.LLM(
            str(folder / "exact"),
            num_gpu_blocks_override=32,
            kv_transfer_config=connector,
            **ENGINE,
            **engine_args(max_bytes=max_bytes, device="cpu"),
        )
        asked = [{"prompt_token_ids": ids} for ids in texts]
        answers = engine.generate(asked, sampling(tokens, temperature=0.0), use_tqdm=False)
        save(results, case, answers, EXACT)
        engine.llm_engine.engine_core.shutdown()
        del engine
    return results


if __name__ == "__main__":
    case, folder = sys.argv[1], Path(sys.argv[2])
    cases = {"pages": follow, "hand_over": hand_over}
    results = asyncio.run(fly(folder)) if case == "flight" else cases[case](folder)
    np.savez(folder / f"{case}.npz", **results)
