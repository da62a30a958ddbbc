"""Send weights to a running vLLM while it generates, and print the cost of each update.

    python examples/sync_to_vllm.py

A trainer in float32 makes AdamW steps on random tokens. After each step, the trainer sends the
weights to a vLLM engine in bfloat16, which continues to answer requests. Every fourth version is
sent in full. All other versions are sent as deltas (only the changed weights), because the script
assumes a link of 100 Mbit/s. The script prints the bytes, the seconds and the pause of each update,
and the versions that sampled each answer. The script also compares the engine's answers with the
answers of a new engine that starts with the same weights. The model is tiny and random. To use
another model, pass its path.
"""

import asyncio
import os
import sys
import tempfile
from typing import Any

# What vLLM needs on a CPU: no model hub, no compilation, one thread.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

import torch
import vllm
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from vllm.v1.engine.async_llm import AsyncLLM

from primeblocks import weightsync
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters import vllm as into_vllm

MODEL = {"num_layers": 4, "hidden": 256, "num_experts": 16, "top_k": 4, "vocab": 2048}
VERSIONS, FULL_EVERY = 8, 4
LINK_BYTES_PER_S = 12.5e6
REQUESTS, PROMPT, GENERATED = 4, 16, 1500
LR = 1e-6
TIMEOUT_S = 60.0
ENGINE = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 2048,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
}


class Engine:
    """A vLLM `AsyncLLM`, with a counter of its sampled tokens."""

    def __init__(self, path: str) -> None:
        arguments = vllm.AsyncEngineArgs(path, **ENGINE, **into_vllm.engine_args())
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.tokens = 0

    async def answer(self, name: str, prompt: list[int], length: int) -> Any:
        sampling = vllm.SamplingParams(
            max_tokens=length, temperature=0, logprobs=0, ignore_eos=True, detokenize=False
        )
        # Each request has its own salt, so no request finds pages of an old version.
        ask = {"prompt_token_ids": prompt, "cache_salt": name}
        answer = None
        async for output in self.llm.generate(ask, sampling, request_id=name):
            answer, self.tokens = output, self.tokens + 1
        return answer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tokens = torch.randint(model.config.vocab_size, (4, 64), generator=torch.manual_seed(step))
    logits = model(tokens).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


async def sync(model: torch.nn.Module, engine: Engine, prompts: list[list[int]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    plan, transport = weightsync.announce(
        f"example-{os.getpid()}", model, dtype=torch.bfloat16, bucket_bytes=1 << 20
    )
    print(plan.table(), "\n")
    with transport:
        publisher = weightsync.Publisher(
            plan, model, transport, full_every=FULL_EVERY, link_bytes_per_s=LINK_BYTES_PER_S
        )
        await into_vllm.attach(engine.llm, plan, transport, timeout_s=TIMEOUT_S)
        asked = [
            asyncio.create_task(engine.answer(f"long{i}", prompt, GENERATED))
            for i, prompt in enumerate(prompts)
        ]
        print("version      bytes   of full  publish s   update s    pause s  tokens so far")
        for version in range(1, VERSIONS + 1):
            # In a thread, so that the engine continues.
            await asyncio.to_thread(train, model, optimizer, version)
            sent = await asyncio.to_thread(publisher.publish, version, timeout_s=TIMEOUT_S)
            report = await into_vllm.update(
                engine.llm, sent, in_flight="continue", timeout_s=TIMEOUT_S
            )
            print(
                f"{version:7} {sent.bytes:10,} {sent.bytes / plan.bytes_total:9.2%} "
                f"{sent.seconds:10.4f} {report.seconds:10.4f} {report.pause_seconds:10.4f} "
                f"{engine.tokens:14}"
            )
        for output in await asyncio.gather(*asked):
            spans = output.outputs[0].weight_versions
            text = ", ".join(f"{s.version}: {s.end - s.start}" for s in spans)
            print(f"tokens of each version in {output.request_id}: {text}")


async def main() -> None:
    folder = tempfile.TemporaryDirectory()
    path = sys.argv[1] if len(sys.argv) > 1 else f"{folder.name}/start"
    if len(sys.argv) == 1:
        tiny_models.save("qwen3_moe", path, **MODEL)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = torch.randint(model.config.vocab_size, (REQUESTS, PROMPT)).tolist()

    engine = Engine(path)
    await sync(model, engine, prompts)
    answers = [await engine.answer(f"after{i}", prompt, 32) for i, prompt in enumerate(prompts)]
    engine.llm.shutdown()

    model.bfloat16().save_pretrained(f"{folder.name}/end")
    fresh = Engine(f"{folder.name}/end")
    same = True
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        other = await fresh.answer(f"fresh{i}", prompt, 32)
        mine, theirs = answer.outputs[0], other.outputs[0]
        same &= mine.token_ids == theirs.token_ids and mine.logprobs == theirs.logprobs
    fresh.llm.shutdown()
    print("tokens and log-probabilities equal those of a fresh engine, bit for bit:", same)


if __name__ == "__main__":
    asyncio.run(main())
