"""Sample from a checkpoint with vLLM, routes captured: `sample_job.py FOLDER DTYPE SEED`.

Reads FOLDER/model, writes FOLDER/samples.npz: tokens and log-probabilities of each request, and
its packed routes.
"""

import json
import sys
from pathlib import Path

import numpy as np

REQUESTS, PROMPT, GENERATED = 16, 32, 128
PAGE_TOKENS, PAGES = 32, 256


def main(folder: Path, dtype: str, seed: int) -> None:
    import vllm

    from primeblocks.replay.adapters.vllm import (
        RouterShape,
        engine_args,
        plan_capture_bytes,
        routes_from_output,
    )

    shape = RouterShape(**json.loads((folder / "shape.json").read_text()))
    max_bytes = plan_capture_bytes(shape, page_tokens=PAGE_TOKENS, device_pages=PAGES)
    engine = vllm.LLM(
        str(folder / "model"),
        dtype=dtype,
        seed=seed,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=PAGES,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        **engine_args(max_bytes=max_bytes, device="cpu"),
    )
    vocab = engine.llm_engine.model_config.get_vocab_size()
    generator = np.random.default_rng(seed)
    if (folder / "prompts.json").exists():
        prompts = json.loads((folder / "prompts.json").read_text())
    else:
        prompts = generator.integers(4, vocab, (REQUESTS, PROMPT)).tolist()
    sampling = vllm.SamplingParams(
        max_tokens=GENERATED, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    results = {}
    for index, request in enumerate(engine.generate(asked, sampling, use_tqdm=False)):
        output, prompt = request.outputs[0], len(request.prompt_token_ids)
        chosen = zip(output.logprobs, output.token_ids, strict=True)
        routes = routes_from_output(output, shape, prompt_tokens=prompt)
        results[f"{index}/tokens"] = np.array([*request.prompt_token_ids, *output.token_ids])
        results[f"{index}/logprobs"] = np.array([at[token].logprob for at, token in chosen])
        results[f"{index}/routes"] = np.frombuffer(routes.pack(), np.uint8)
    np.savez(folder / "samples.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
