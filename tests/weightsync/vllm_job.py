"""What bodies with a real vLLM share: a trainer of one rank, engines' settings, what is seen."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from primeblocks.errors import PrimeblocksError
from primeblocks.testing import tiny_models
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from tests.weightsync.contents import flip_sent

SIZES: dict[str, Any] = {"num_layers": 2, "hidden": 64}
PROMPTS = [[1, 5, 7, 9, 11], [1, *range(20, 60)], [1, *range(100, 117)]]
TIMEOUT_S = 30.0
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
}


def sampling(tokens: int) -> Any:
    import vllm

    return vllm.SamplingParams(
        max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True, detokenize=False
    )


def seen(output: Any) -> list[Any]:
    """Tokens, and their log-probabilities as exact numbers."""
    row = output.outputs[0]
    logprobs = zip(row.logprobs, row.token_ids, strict=True)
    return [list(row.token_ids), [float.hex(lp[token].logprob) for lp, token in logprobs]]


def greedy(llm: Any, tokens: int = 24, request: Any = None) -> list[Any]:
    """What an LLM says; of one LoRA adapter, or of a list of them, one for each prompt."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, sampling(tokens), use_tqdm=False, lora_request=request)
    return [seen(output) for output in outputs]


def error_of(call: Callable[..., object], *args: object) -> tuple[str, str]:
    """The kind and the message of our error, empty without one."""
    try:
        call(*args)
    except PrimeblocksError as error:
        return type(error).__name__, str(error)
    return "", ""


class Trainer:
    """One rank with the weights of a seed."""

    def __init__(self, dtype: str, folder: Path) -> None:
        self.dtype = dtype
        self.model = tiny_models.build("qwen3_moe", seed=0, dtype=dtype, **SIZES)
        source = describe(self.model)
        self.plan = plan_sync([source], source.whole(), bucket_bytes=1 << 16)
        self.root = folder / dtype
        self.root.mkdir(exist_ok=True)
        self.transport = SharedMemoryTransport("policy", owner=True, root=str(self.root))
        self.publisher = Publisher(self.plan, self.model, self.transport)

    def publish(self, version: int, *, seed: int) -> Any:
        other = tiny_models.build("qwen3_moe", seed=seed, dtype=self.dtype, **SIZES)
        with torch.no_grad():
            for mine, new in zip(self.model.parameters(), other.parameters(), strict=True):
                mine.copy_(new)
        return self.publisher.publish(version, timeout_s=TIMEOUT_S)

    def flip(self, version: int) -> None:
        flip_sent(self.transport, self.root, version, -12345)

    def gap(self, prompt: list[int], outcome: list[Any]) -> float:
        """How far an engine's log-probabilities are from those of the trainer's own model."""
        tokens, told = outcome
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        mine = torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(tokens)[:, None])
        theirs = torch.tensor([float.fromhex(value) for value in told], dtype=torch.float64)
        return float((mine[:, 0] - theirs).abs().max())


class Requests:
    """Requests to an AsyncLLM, by name, and how far each of them is."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.progress: dict[str, int] = {}
        self.moved = asyncio.Condition()

    async def one(self, name: str, ids: list[int], tokens: int) -> Any:
        """Greedy tokens; its own cache salt, so that no KV of other requests is used."""
        output = None
        prompt = {"prompt_token_ids": ids, "cache_salt": name}
        async for output in self.engine.generate(prompt, sampling(tokens), request_id=name):
            async with self.moved:
                self.progress[name] = len(output.outputs[0].token_ids)
                self.moved.notify_all()
        return output

    async def all(self, name: str, tokens: int) -> list[Any]:
        """What one request a prompt gives, one after the other."""
        pairs = zip(names(name), PROMPTS, strict=True)
        return [seen(await self.one(one, ids, tokens)) for one, ids in pairs]

    def start(self, name: str, tokens: int) -> list[asyncio.Task[Any]]:
        """One request a prompt, together."""
        pairs = zip(names(name), PROMPTS, strict=True)
        return [asyncio.create_task(self.one(one, ids, tokens)) for one, ids in pairs]

    async def reach(self, *names: str, tokens: int) -> None:
        """Wait until each of them has so many tokens."""
        async with self.moved:
            await self.moved.wait_for(lambda: all(self.progress.get(n, 0) >= tokens for n in names))


def names(name: str) -> list[str]:
    """Of one request a prompt."""
    return [f"{name}{index}" for index in range(len(PROMPTS))]


def spans(output: Any) -> list[list[Any]]:
    """Which tokens are of which version."""
    return [[span.version, span.start, span.end] for span in output.outputs[0].weight_versions]


def cost(report: Any) -> list[Any]:
    """A report as JSON."""
    return [report.version, report.seconds, report.pause_seconds]
