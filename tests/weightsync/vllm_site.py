"""What tests with a real vLLM share: trainers of one rank, engines of a fleet, what they say."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from primeblocks.errors import PrimeblocksError, how_it_ended
from primeblocks.testing import tiny_models
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from primeblocks.weightsync.adapters import vllm as adapter
from primeblocks.weightsync.engines.lora import AdapterSpec, adapter_parameters
from primeblocks.weightsync.transports import FileTransport, GroupTransport
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.engine_forks import Nursery
from tests.engine_job import KV_BYTES
from tests.ports import free_port
from tests.weightsync.contents import PACKED, flip_sent, packed_end, store_at

SIZES: dict[str, Any] = {"num_layers": 2, "hidden": 64}
SAID = 12  # tokens of a greedy answer
PROMPTS = [[1, 5, 7, 9, 11], [1, *range(20, 60)], [1, *range(100, 117)]]
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": KV_BYTES,
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


CARRIERS = ("shared_memory", "file", *PACKED, "group")


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    """The marks of a file whose tests start engines."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"not installed: {', '.join(missing)}"
    return [pytest.mark.vllm, pytest.mark.skipif(bool(missing), reason=reason)]


def trainer_end(kind: str, folder: Path, *, readers: int) -> Any:
    """The trainer's end of a carrier, in a folder that is made for it."""
    folder.mkdir()
    if kind == "shared_memory":
        return SharedMemoryTransport("policy", owner=True, root=str(folder))
    if kind == "file":
        return FileTransport(str(folder), owner=True)
    if kind == "group":  # Its workers join it: gloo, beside their own.
        return GroupTransport(store=store_at(folder), trainers=1, readers=readers, rank=0)
    return packed_end(kind, folder, owner=True, keep=True)


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
    outputs = llm.generate(prompts, sampling(SAID), use_tqdm=False, lora_request=request)
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

    def take(self, *, seed: int) -> None:
        pairs = zip(self.model.parameters(), self.build(seed=seed).parameters(), strict=True)
        with torch.no_grad():
            for mine, new in pairs:
                mine.copy_(new)

    def publish(self, version: int, *, seed: int) -> Any:
        self.take(seed=seed)
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
        self.progress: dict[str, float] = {}
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
        async with self.moved:
            self.progress[name] = math.inf
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
        """Wait until each of them has so many tokens, or has ended."""
        async with self.moved:
            await self.moved.wait_for(lambda: all(self.progress.get(n, 0) >= tokens for n in names))

    async def advance(self, *names: str, tokens: int) -> None:
        """Wait until each of them has so many tokens more than now, or has ended."""
        await asyncio.gather(
            *(self.reach(name, tokens=self.progress.get(name, 0) + tokens) for name in names)
        )


def names(name: str) -> list[str]:
    """Of one request a prompt."""
    return [f"{name}{index}" for index in range(len(PROMPTS))]


def spans_of(output: Any) -> list[list[Any]]:
    """Which tokens are of which version."""
    return [[span.version, span.start, span.end] for span in output.outputs[0].weight_versions]


class InProcess:
    """An AsyncLLM of the fleet."""

    def __init__(self, checkpoint: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            str(checkpoint), dtype="float32", **ENGINE, **adapter.engine_args()
        )
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.requests = Requests(self.engine)
        (process,) = self.engine.engine_core.resources.engine_manager.processes
        self.pid = process.pid

    async def greedy(self, name: str) -> list[Any]:
        return await self.requests.all(name, SAID)

    async def long(self, name: str) -> tuple[int, Any]:
        output = await self.requests.one(name, PROMPTS[0], 900)
        return len(output.outputs[0].token_ids), spans_of(output)

    async def amid(self, name: str) -> None:
        """Wait until a long request has its first tokens."""
        await self.requests.reach(name, tokens=20)

    def close(self) -> None:
        self.engine.shutdown()


class Served:
    """A server of the fleet, asked over HTTP; `words` are further ones of its command line."""

    def __init__(
        self,
        checkpoint: Path,
        log: Path,
        *words: str,
        nursery: Nursery,
        environment: dict[str, str] | None = None,
    ) -> None:
        port = free_port()
        arguments = ["--model", str(checkpoint), "--port", str(port), "--host", "127.0.0.1"]
        arguments += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
        arguments += ["--max-num-seqs", "8", "--skip-tokenizer-init", "--enable-scale-out"]
        arguments += ["--kv-cache-memory-bytes", str(KV_BYTES)]
        arguments += ["--logprobs-mode", "processed_logprobs", *adapter.server_args(), *words]
        settings = {"VLLM_SERVER_DEV_MODE": "1", **(environment or {})}
        self.log, self.process = log, nursery.start(arguments, environment=settings, log=log)
        self.url = f"http://127.0.0.1:{port}"
        self.before_long = math.inf
        self.engine = adapter.VllmServer(self.url)
        self.before_long = math.inf  # generated tokens

    def wait(self, timeout_s: float) -> None:
        """Until it answers."""
        deadline, never = time.monotonic() + timeout_s, threading.Event()
        while time.monotonic() < deadline:
            ended = self.process.poll()
            assert ended is None, (
                f"the server {how_it_ended(ended)}\n{self.log.read_text()[-4000:]}"
            )
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health"):
                return
            never.wait(0.1)
        raise AssertionError("the server did not start")

    async def ask(self, ids: list[int], tokens: int, salt: str) -> Any:
        sampling = {
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        }
        body = {"token_ids": ids, "sampling_params": sampling, "cache_salt": salt}
        request = urllib.request.Request(
            f"{self.url}/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )

        def answer() -> Any:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.load(response)["choices"][0]

        return await asyncio.to_thread(answer)

    async def greedy(self, name: str) -> list[Any]:
        result = []
        for index, ids in enumerate(PROMPTS):
            choice = await self.ask(ids, SAID, f"{name}{index}")
            told = [float.hex(item["logprob"]) for item in choice["logprobs"]["content"]]
            result.append([choice["token_ids"], told])
        return result

    def generated(self) -> float:
        """How many tokens it has generated since it started."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT_S) as response:
            lines = response.read().decode().splitlines()
        counter = "vllm:generation_tokens_total"
        return next(float(line.split()[-1]) for line in lines if line.startswith(counter))

    async def amid(self, _: str) -> None:
        """Wait until a long request has its first tokens."""
        while await asyncio.to_thread(self.generated) < self.before_long + 20:
            await asyncio.sleep(0.01)

    async def long(self, name: str) -> tuple[int, Any]:
        self.before_long = await asyncio.to_thread(self.generated)
        choice = await self.ask(PROMPTS[0], 900, name)
        spans = [[s["version"], s["start"], s["end"]] for s in choice["weight_versions"]]
        return len(choice["token_ids"]), spans

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
