"""What bodies with a real vLLM share: trainers of one rank, engines' settings, what is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from primeblocks.errors import PrimeblocksError
from primeblocks.testing import tiny_models
from primeblocks.weightsync import (
    FileTransport,
    Publisher,
    SharedMemoryTransport,
    describe,
    plan_sync,
)
from primeblocks.weightsync.engines.lora import AdapterSpec, adapter_parameters
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


LORA_ENGINE: dict[str, Any] = {
    **ENGINE,
    "block_size": 32,
    "max_model_len": 512,
    "max_loras": 2,
    "max_lora_rank": 8,
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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


def greedy(llm: Any, request: Any = None) -> list[Any]:
    """What an LLM says; of one LoRA adapter, or of a list of them, one for each prompt."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, sampling(24), use_tqdm=False, lora_request=request)
    return [seen(output) for output in outputs]


def error_of(call: Callable[..., object], *args: object, **named: object) -> tuple[str, str]:
    """The kind and the message of our error, empty without one."""
    try:
        call(*args, **named)
    except PrimeblocksError as error:
        return type(error).__name__, str(error)
    return "", ""


class Trainer:
    """One rank with the weights of a seed."""

    def __init__(self, dtype: str, folder: Path, family: str = "qwen3_moe") -> None:
        self.build = partial(tiny_models.build, family, dtype=dtype, **SIZES)
        self.model = self.build(seed=0)
        source = describe(self.model)
        self.plan = plan_sync([source], source.whole(), bucket_bytes=1 << 16)
        self.root = folder / dtype
        self.root.mkdir(exist_ok=True)
        self.transport = SharedMemoryTransport("policy", owner=True, root=str(self.root))
        self.publisher = Publisher(self.plan, self.model, self.transport)

    def publish(self, version: int, *, seed: int) -> Any:
        pairs = zip(self.model.parameters(), self.build(seed=seed).parameters(), strict=True)
        with torch.no_grad():
            for mine, new in pairs:
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


class AdapterTrainer:
    """A PEFT model on one rank, that publishes its adapter as `name` and saves it in folders."""

    def __init__(
        self, name: str, checkpoint: Path, transport: Any, root: Path, **settings: Any
    ) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        settings = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS} | settings
        config = peft.LoraConfig(init_lora_weights=False, **settings)
        self.model = peft.get_peft_model(base, config)
        self.spec = AdapterSpec.from_peft(name, self.model.peft_config["default"].to_dict())
        self.tensors = adapter_parameters(self.model)
        source = describe(self.tensors)
        self.plan = plan_sync([source], source.whole(dtype=base.dtype), bucket_bytes=1 << 14)
        self.checkpoint, self.transport, self.root = checkpoint, transport, root
        self.publisher = Publisher(self.plan, self.tensors, transport)

    @classmethod
    def pair(cls, checkpoint: Path, folder: Path) -> tuple[AdapterTrainer, AdapterTrainer]:
        """A policy over shared memory, a critic over files."""
        memory, disk = (folder / kind for kind in ("memory", "disk"))
        for root in (memory, disk):
            root.mkdir(parents=True)
        shared = SharedMemoryTransport("lora", owner=True, root=str(memory))
        files = FileTransport(str(disk), owner=True)
        return cls("policy", checkpoint, shared, memory), cls("critic", checkpoint, files, disk)

    def draw(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.3)

    def publish(self, version: int) -> Any:
        self.draw(version)
        return self.publisher.publish(version, timeout_s=TIMEOUT_S)

    def save(self, version: int) -> str:
        self.draw(version)
        self.model.save_pretrained(self.root.parent / f"adapter-{version}")
        return str(self.root.parent / f"adapter-{version}")

    def flip(self, version: int) -> None:
        flip_sent(self.transport, self.root, version, -1234)


class Requests:
    """Requests to an AsyncLLM, by name, and how far each of them is."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.progress: dict[str, int] = {}
        self.moved = asyncio.Condition()

    async def one(self, name: str, ids: list[int], tokens: int, lora: Any = None) -> Any:
        """Greedy tokens; without an adapter, no KV of other requests is used."""
        output = None
        salt = {} if lora else {"cache_salt": name}
        async for output in self.engine.generate(
            {"prompt_token_ids": ids, **salt}, sampling(tokens), request_id=name, lora_request=lora
        ):
            async with self.moved:
                self.progress[name] = len(output.outputs[0].token_ids)
                self.moved.notify_all()
        return output

    async def all(self, name: str, tokens: int) -> list[Any]:
        """What one request a prompt gives, one after the other."""
        pairs = zip(names(name), PROMPTS, strict=True)
        return [seen(await self.one(one, ids, tokens)) for one, ids in pairs]

    def start(self, name: str, tokens: int, lora: Any = None) -> list[asyncio.Task[Any]]:
        """One request a prompt, together."""
        pairs = zip(names(name), PROMPTS, strict=True)
        return [asyncio.create_task(self.one(one, ids, tokens, lora)) for one, ids in pairs]

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
