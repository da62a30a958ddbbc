"""Run by test_vllm_update.py in a process of its own: `vllm_update_job.py CASE FOLDER`.

Prints one line of JSON, what the case saw. Checkpoints FOLDER/<dtype>-0 and -1 are there.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from primeblocks.errors import PrimeblocksError
from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.testing.faults import flip_byte
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from primeblocks.weightsync.adapters import vllm as adapter

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


def greedy(llm: Any) -> list[Any]:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [seen(o) for o in llm.generate(prompts, sampling(24), use_tqdm=False)]


def error_of(call: Any) -> list[str]:
    try:
        call()
    except PrimeblocksError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


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
        flip_byte(self.root / "primeblocks-policy" / f"{version}.blob", 12345)


def offline(folder: Path, dtype: str) -> dict[str, Any]:
    import vllm

    trainer = Trainer(dtype, folder)
    path = str(folder / dtype)
    llm = vllm.LLM(f"{path}-0", dtype=dtype, **ENGINE, **adapter.engine_args())
    result: dict[str, Any] = {"start": greedy(llm)}
    update = adapter.update_llm
    first = trainer.publish(1, seed=1)
    result["unattached"] = error_of(lambda: update(llm, first, timeout_s=TIMEOUT_S))
    adapter.attach_llm(llm, trainer.plan, trainer.transport)
    trainer.flip(1)
    result["corrupt"] = error_of(lambda: update(llm, first, timeout_s=TIMEOUT_S))
    result["after_corrupt"] = [greedy(llm), llm.get_weight_version()]
    trainer.flip(1)
    update(llm, first, timeout_s=TIMEOUT_S)
    result["updated"] = [greedy(llm), llm.get_weight_version()]

    # A load that breaks half-way.
    second = trainer.publish(2, seed=0)
    core = llm.llm_engine.engine_core.engine_core.model_executor
    model = core.driver_worker.worker.get_model()
    whole = model.load_weights
    broken = []

    def breaks_once(tensors: Any) -> Any:
        if broken:
            return whole(tensors)
        broken.append(True)
        return whole(_cut_short(tensors))

    model.load_weights = breaks_once
    result["broken"] = error_of(lambda: update(llm, second, timeout_s=TIMEOUT_S))
    result["after_broken"] = [greedy(llm), llm.get_weight_version()]
    broken.clear()
    model.load_weights = lambda tensors: whole(_without_last(tensors, broken))
    result["partial"] = error_of(lambda: update(llm, second, timeout_s=TIMEOUT_S))
    result["after_partial"] = [greedy(llm), llm.get_weight_version()]
    model.load_weights = whole
    update(llm, second, timeout_s=TIMEOUT_S)
    result["back"] = [greedy(llm), llm.get_weight_version()]

    late = first.__class__(9, first.bytes, 0.0, first.digest)
    result["never_committed"] = error_of(lambda: update(llm, late, timeout_s=0.2))
    del llm, core, model, whole
    fresh = vllm.LLM(f"{path}-1", dtype=dtype, **ENGINE)
    result["fresh"] = greedy(fresh)
    trainer.transport.close()
    return result


def _cut_short(tensors: Any) -> Any:
    for index, item in enumerate(tensors):
        if index == 9:
            raise RuntimeError("out of memory")
        yield item


def _without_last(tensors: Any, done: list[bool]) -> Any:
    items = list(tensors)
    yield from items if done else items[:-1]
    done.append(True)


async def failing(call: Any) -> list[Any]:
    start = time.monotonic()
    try:
        await call
    except PrimeblocksError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return ["", "", 0.0]


async def faults(engine: Any, trainer: Trainer, one: Any) -> dict[str, Any]:
    """Corrupt bytes, an update that was left open, a hanging engine, a dead one."""
    result: dict[str, Any] = {}
    receipt = trainer.publish(4, seed=0)
    trainer.flip(4)
    result["corrupt"] = await failing(adapter.update(engine, receipt, timeout_s=TIMEOUT_S))
    result["after_corrupt"] = [seen(await one(f"c{i}", p, 24)) for i, p in enumerate(PROMPTS)]
    result["version_after_corrupt"] = await engine.get_weight_version()
    trainer.flip(4)
    await engine.start_weight_update()  # As an update leaves it that ran into its deadline.
    await adapter.update(engine, receipt, timeout_s=TIMEOUT_S)
    result["retried"] = [seen(await one(f"r{i}", p, 24)) for i, p in enumerate(PROMPTS)]

    (process,) = engine.engine_core.resources.engine_manager.processes
    receipt = trainer.publish(5, seed=1)
    os.kill(process.pid, signal.SIGSTOP)
    result["hung"] = await failing(adapter.update(engine, receipt, timeout_s=1.0))
    os.kill(process.pid, signal.SIGCONT)
    await adapter.update(engine, receipt, timeout_s=TIMEOUT_S)
    result["version_after_hung"] = await engine.get_weight_version()
    receipt = trainer.publish(6, seed=0)
    os.kill(process.pid, signal.SIGKILL)
    result["dead"] = await failing(adapter.update(engine, receipt, timeout_s=TIMEOUT_S))
    return result


async def running(folder: Path) -> dict[str, Any]:
    """Updates under requests in flight, then the faults."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    trainer = Trainer("float32", folder)
    arguments = AsyncEngineArgs(
        str(folder / "float32-0"), dtype="float32", **ENGINE, **adapter.engine_args()
    )
    engine = AsyncLLM.from_engine_args(arguments)
    progress: dict[str, int] = {}
    moved = asyncio.Condition()

    async def one(name: str, ids: list[int], tokens: int) -> Any:
        output = None
        prompt = {"prompt_token_ids": ids, "cache_salt": name}
        async for output in engine.generate(prompt, sampling(tokens), request_id=name):
            async with moved:
                progress[name] = len(output.outputs[0].token_ids)
                moved.notify_all()
        return output

    result: dict[str, Any] = {}
    await adapter.attach(engine, trainer.plan, trainer.transport, timeout_s=TIMEOUT_S)
    reference = [seen(await one(f"ref{i}", ids, 200)) for i, ids in enumerate(PROMPTS)]
    result["reference"] = reference
    for version, mode in enumerate(("continue", "recompute", "abort"), start=1):
        names = [f"{mode}{i}" for i in range(len(PROMPTS))]
        tasks = [asyncio.create_task(one(n, p, 200)) for n, p in zip(names, PROMPTS, strict=True)]
        async with moved:
            await moved.wait_for(lambda now=names: all(progress.get(n, 0) >= 20 for n in now))
        receipt = trainer.publish(version, seed=version % 2)
        report = await adapter.update(engine, receipt, in_flight=mode, timeout_s=TIMEOUT_S)
        outputs = await asyncio.gather(*tasks)
        result[mode] = {
            "outputs": [seen(o) for o in outputs],
            "finish": [o.outputs[0].finish_reason for o in outputs],
            "spans": [
                [[s.version, s.start, s.end] for s in o.outputs[0].weight_versions] for o in outputs
            ],
            "report": [report.version, report.seconds, report.pause_seconds],
            "paused": await engine.is_paused(),
            "after": [seen(await one(f"{mode}-after{i}", p, 24)) for i, p in enumerate(PROMPTS)],
        }
    result |= await faults(engine, trainer, one)
    engine.shutdown()
    trainer.transport.close()
    return result


if __name__ == "__main__":
    register()
    case, folder = sys.argv[1], Path(sys.argv[2])
    result = asyncio.run(running(folder)) if case == "running" else offline(folder, case)
    (folder / f"{case}.json").write_text(json.dumps(result))
