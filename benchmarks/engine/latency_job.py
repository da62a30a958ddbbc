"""An engine that is timed on demand: `latency_job.py FOLDER capture|plain`.

For each line `SEED PROMPT_START` on standard input it serves one batch of fresh prompts and prints
the seconds from the first prompt to the last answer. Ends with its input.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

REQUESTS, PROMPT, GENERATED = 16, 256, 128
PAGE_TOKENS, PAGES = 32, 512


def main(folder: Path, capture: bool) -> None:
    import vllm

    from primeblocks.replay.adapters.vllm import RouterShape, engine_args, plan_capture_bytes

    shape = RouterShape(**json.loads((folder / "shape.json").read_text()))
    arguments = {"enforce_eager": True}
    if capture:
        room = plan_capture_bytes(shape, page_tokens=PAGE_TOKENS, device_pages=PAGES)
        arguments = engine_args(max_bytes=room, device="cpu")
    engine = vllm.LLM(
        str(folder / "model"),
        dtype="bfloat16",
        max_model_len=PROMPT + GENERATED,
        max_num_seqs=REQUESTS,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=PAGES,
        skip_tokenizer_init=True,
        **arguments,
    )
    vocab = engine.llm_engine.model_config.get_vocab_size()
    print("ready", flush=True)
    for line in sys.stdin:
        seed, prompt_start = map(int, line.split())
        prompts = np.random.default_rng(seed).integers(4, vocab, (REQUESTS, PROMPT)).tolist()
        sampling = vllm.SamplingParams(
            max_tokens=GENERATED,
            temperature=1.0,
            ignore_eos=True,
            detokenize=False,
            routed_experts_prompt_start=prompt_start,
        )
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        begin = time.perf_counter()
        answers = engine.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        for answer in answers:
            rows = answer.outputs[0].routed_experts
            assert (rows is not None) == capture
            assert rows is None or len(rows) == PROMPT + GENERATED - 1 - prompt_start
        print(seconds, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "capture")
