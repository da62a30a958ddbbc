"""Run by test_vllm_capture.py in its own process: `vllm_capture_job.py FOLDER`.

Reads the checkpoints FOLDER/exact and FOLDER/bf16, writes FOLDER/results.npz: for each case the
tokens, log-probabilities, cached prompt tokens and packed routes of each request.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from primeblocks.replay.adapters.vllm import (
    RouterShape,
    engine_args,
    plan_capture_bytes,
    routes_from_base64,
    routes_from_output,
)

PAGE_TOKENS = 32
PAGES = 64
CHUNK = 64  # tokens of one step: longer prompts are prefilled in several
PROMPT_START = 20
EXACT = RouterShape(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2)
BF16 = RouterShape(num_layers=8, moe_layers=tuple(range(8)), num_experts=32, top_k=4)


def start(model: Path, shape: RouterShape, *, dtype: str, chunk: int) -> Any:
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


def sample(engine: Any, prompts: list[list[int]], *, tokens: int, **sampling: Any) -> list[Any]:
    import vllm

    parameters = vllm.SamplingParams(
        max_tokens=tokens,
        temperature=1.0,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        **sampling,
    )
    return engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False
    )


def tokens_of(request: Any) -> list[int]:
    return [*request.prompt_token_ids, *request.outputs[0].token_ids]


def save(
    into: dict[str, np.ndarray], case: str, requests: list[Any], shape: RouterShape, start: int = 0
) -> None:
    for index, request in enumerate(requests):
        output, prompt = request.outputs[0], len(request.prompt_token_ids)
        routes = routes_from_output(output, shape, prompt_tokens=prompt, prompt_start=start)
        chosen = [
            at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        into |= {
            f"{case}/{index}/tokens": np.array(tokens_of(request)),
            f"{case}/{index}/logprobs": np.array(chosen),
            f"{case}/{index}/cached": np.array(request.num_cached_tokens),
            f"{case}/{index}/routes": np.frombuffer(routes.pack(), np.uint8),
        }


def main(folder: Path) -> None:
    from vllm.utils.serial_utils import numpy2base64

    generator = np.random.default_rng(0)
    results: dict[str, np.ndarray] = {}

    def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
        return generator.integers(4, vocab, (count, length)).tolist()

    engine = start(folder / "exact", EXACT, dtype="float32", chunk=CHUNK)
    short, long = prompts(4, 40, 512), prompts(3, 150, 512)
    plain = sample(engine, short, tokens=24)
    save(results, "plain", plain, EXACT)
    chunked = sample(engine, long, tokens=24)
    save(results, "chunked", chunked, EXACT)
    turns = [tokens_of(request) + prompts(1, 20, 512)[0] for request in chunked]
    save(results, "prefix_hit", sample(engine, turns, tokens=24), EXACT)
    late = sample(engine, short, tokens=24, routed_experts_prompt_start=PROMPT_START)
    save(results, "prompt_start", late, EXACT, start=PROMPT_START)

    rows = plain[0].outputs[0].routed_experts
    sent = routes_from_base64(numpy2base64(rows), EXACT, tokens=len(tokens_of(plain[0])))
    results["http"] = np.frombuffer(sent.pack(), np.uint8)
    store = engine.collective_rpc(lambda worker: worker.model_runner.aux_output_connector._store)[0]
    results["store"] = np.array([store._store.object_nbytes, store._store.num_slots])
    engine.llm_engine.engine_core.shutdown()
    assert store._closed  # the plug-in closes it with the runner
    del engine

    engine = start(folder / "bf16", BF16, dtype="bfloat16", chunk=512)
    save(results, "bf16", sample(engine, prompts(16, 32, 2048), tokens=128, seed=1), BF16)
    np.savez(folder / "results.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
