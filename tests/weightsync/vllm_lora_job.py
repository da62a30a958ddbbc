"""Run by test_vllm_lora.py in a process of its own: `vllm_lora_job.py DTYPE FOLDER CASES`.

Writes what each case saw into FOLDER/CASE.json. FOLDER/model is the checkpoint of the base model.
"""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from primeblocks.errors import PrimeblocksError
from primeblocks.plugins.vllm import register
from primeblocks.weightsync import (
    FileTransport,
    Publisher,
    SharedMemoryTransport,
    describe,
    plan_sync,
)
from primeblocks.weightsync.adapters.vllm import lora as adapter
from primeblocks.weightsync.adapters.vllm.lora_worker import LoraWorkerExtension, versioned_request
from primeblocks.weightsync.engines.lora import AdapterSpec, adapter_parameters
from tests.weightsync.contents import flip_sent

PROMPTS = [[1, 5, 7, 9, 11], [1, *range(20, 60)], [1, *range(100, 117)]]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIMEOUT_S = 30.0
SHORT, LONG = 16, 400
ENGINE: dict[str, Any] = {
    "block_size": 32,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "max_loras": 2,
    "max_lora_rank": 8,
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


def greedy(llm: Any, request: Any = None) -> list[Any]:
    """Of one adapter, or of a list of them, one for each prompt."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [
        seen(o)
        for o in llm.generate(prompts, sampling(SHORT), use_tqdm=False, lora_request=request)
    ]


def error_of(call: Any) -> list[str]:
    try:
        call()
    except PrimeblocksError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


class Trainer:
    """A PEFT model on one rank, that publishes its adapter as `name` and saves it in folders."""

    def __init__(
        self, name: str, dtype: str, transport: Any, root: Path, **peft_settings: Any
    ) -> None:
        # Not above: the engine's process imports this file too.
        import peft
        from transformers import AutoModelForCausalLM

        model = root.parents[1] / "model"
        base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        settings = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS} | peft_settings
        config = peft.LoraConfig(init_lora_weights=False, **settings)
        self.model = peft.get_peft_model(base, config)
        self.spec = AdapterSpec.from_peft(name, self.model.peft_config["default"].to_dict())
        self.tensors = adapter_parameters(self.model)
        source = describe(self.tensors)
        target = source.whole(dtype=getattr(torch, dtype))
        self.plan = plan_sync([source], target, bucket_bytes=1 << 14)
        self.transport, self.root = transport, root
        self.publisher = Publisher(self.plan, self.tensors, transport)

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


def trainers(folder: Path, dtype: str) -> tuple[Trainer, Trainer]:
    """One over shared memory, one over files."""
    roots = [folder / kind for kind in ("memory", "disk")]
    for root in roots:
        root.mkdir(parents=True)
    memory = SharedMemoryTransport("lora", owner=True, root=str(roots[0]))
    disk = FileTransport(str(roots[1]), owner=True)
    return (
        Trainer("policy", dtype, memory, roots[0]),
        Trainer("critic", dtype, disk, roots[1]),
    )


def offline(folder: Path, dtype: str) -> dict[str, Any]:
    import vllm

    policy, critic = trainers(folder / "offline", dtype)
    model = str(folder / "model")
    llm = vllm.LLM(model, dtype=dtype, **ENGINE, **adapter.lora_engine_args())
    result: dict[str, Any] = {"base": greedy(llm)}
    update = adapter.update_lora_llm
    first = policy.publish(1)
    result["unattached"] = error_of(lambda: update(llm, "policy", first, timeout_s=TIMEOUT_S))
    result |= refused_at_attach(llm, policy, dtype)

    for trainer in (policy, critic):
        adapter.attach_lora_llm(llm, trainer.spec, trainer.plan, trainer.transport, keep=3)
    policy.flip(1)
    result["corrupt_first"] = error_of(lambda: update(llm, "policy", first, timeout_s=TIMEOUT_S))
    policy.flip(1)
    one = update(llm, "policy", first, timeout_s=TIMEOUT_S)
    result["one"] = greedy(llm, one)
    result["name"] = one.lora_name
    result["critic"] = greedy(llm, update(llm, "critic", critic.publish(1), timeout_s=TIMEOUT_S))
    two = update(llm, "policy", policy.publish(2), timeout_s=TIMEOUT_S)
    result["two"] = greedy(llm, two)
    result["one_again"] = greedy(llm, one)
    result["mixed"] = greedy(llm, [one, two, one])

    third = policy.publish(3)
    policy.flip(3)
    result["corrupt"] = error_of(lambda: update(llm, "policy", third, timeout_s=TIMEOUT_S))
    result["after_corrupt"] = [greedy(llm, one), greedy(llm, two), held(llm)]
    policy.flip(3)
    result |= refused_at_update(llm, policy, third)
    three = update(llm, "policy", third, timeout_s=TIMEOUT_S)
    result["three"] = greedy(llm, three)
    # Three versions take turns in two slots.
    result["turns"] = [greedy(llm, request) for request in (one, two, three, one)]
    fourth = policy.publish(4)
    result["full"] = error_of(lambda: update(llm, "policy", fourth, timeout_s=TIMEOUT_S))
    adapter.remove_lora_llm(llm, one)
    result["refused"] = refused(lambda: greedy(llm, one))
    result["removed"] = [error_of(lambda: adapter.remove_lora_llm(llm, one)), held(llm)]
    result["four"] = greedy(llm, update(llm, "policy", fourth, timeout_s=TIMEOUT_S))
    # As vLLM does after every update of the base weights.
    core = llm.llm_engine.engine_core.engine_core.model_executor
    core.driver_worker.worker.model_runner.reset_lora_state()
    result["after_reset"] = [greedy(llm, two), greedy(llm)]
    del llm, core

    result |= fresh(folder, policy, dtype)
    if dtype == "float32":
        result["peft"] = peft_logprobs(policy, result["three"])
    policy.transport.close()
    critic.transport.close()
    return result


def refused(call: Any) -> str:
    from vllm.exceptions import VLLMValidationError

    try:
        call()
    except VLLMValidationError as error:
        return str(error)
    return ""


def held(llm: Any) -> int:
    return len(llm.llm_engine.list_loras())


def refused_at_attach(llm: Any, policy: Trainer, dtype: str) -> dict[str, Any]:
    def attach(trainer: Trainer) -> list[str]:
        return error_of(
            lambda: adapter.attach_lora_llm(llm, trainer.spec, trainer.plan, trainer.transport)
        )

    def other(name: str, **settings: Any) -> list[str]:
        return attach(Trainer(name, dtype, policy.transport, policy.root, **settings))

    narrow = {name: tensor[:, :-1] for name, tensor in policy.tensors.items() if "A" in name}
    source = describe(dict(policy.tensors) | narrow)
    cut = plan_sync([source], source.whole(), bucket_bytes=1 << 14)
    return {
        "rank": other("wide", r=9),
        "module": other("head", target_modules=["lm_head"]),
        "shape": error_of(lambda: adapter.attach_lora_llm(llm, policy.spec, cut, policy.transport)),
    }


def refused_at_update(llm: Any, policy: Trainer, third: Any) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    update = adapter.update_lora_llm
    other = dataclasses.replace(third, digest="0" * len(third.digest))
    late = dataclasses.replace(third, version=9)
    result = {
        "digest": error_of(lambda: update(llm, "policy", other, timeout_s=TIMEOUT_S)),
        "never_committed": error_of(lambda: update(llm, "policy", late, timeout_s=0.2)),
        "name_taken": error_of(
            lambda: update(llm, "policy", dataclasses.replace(other, version=2), timeout_s=5.0)
        ),
    }
    taken = versioned_request("policy", third).lora_int_id
    llm.llm_engine.add_lora(LoRARequest("mine", taken, policy.save(7)))
    result["id_taken"] = error_of(lambda: update(llm, "policy", third, timeout_s=TIMEOUT_S))
    llm.llm_engine.remove_lora(taken)
    return result


def fresh(folder: Path, policy: Trainer, dtype: str) -> dict[str, Any]:
    """What a stock engine computes that loads PEFT's folders of versions 1 to 4, and refuses."""
    import vllm
    from vllm.lora.request import LoRARequest

    llm = vllm.LLM(str(folder / "model"), dtype=dtype, enable_lora=True, **ENGINE)
    attach = (policy.spec, policy.plan, policy.transport)
    stock = error_of(lambda: adapter.attach_lora_llm(llm, *attach))
    config = llm.llm_engine.vllm_config
    llm.llm_engine.vllm_config = dataclasses.replace(config, lora_config=None)
    without = error_of(lambda: adapter.attach_lora_llm(llm, *attach))
    llm.llm_engine.vllm_config = config
    outputs = [
        greedy(llm, LoRARequest(f"disk-{version}", version, policy.save(version)))
        for version in (1, 2, 3, 4)
    ]
    return {"fresh": outputs, "stock": stock, "without": without}


def peft_logprobs(policy: Trainer, outputs: list[Any]) -> list[list[float]]:
    """What PEFT gives for the same tokens under version 3."""
    policy.draw(3)
    found = []
    for ids, (tokens, _) in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*ids, *tokens]])).logits[0]
        rows = torch.log_softmax(logits, -1)[len(ids) - 1 : -1]
        found.append(rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist())
    return found


async def failing(call: Any) -> list[str]:
    try:
        await call
    except PrimeblocksError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


async def running(folder: Path, dtype: str) -> dict[str, Any]:
    """A new version, and a corrupt one, while requests on the first one are in flight."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    policy, critic = trainers(folder / "running", dtype)
    arguments = AsyncEngineArgs(
        str(folder / "model"), dtype=dtype, **ENGINE, **adapter.lora_engine_args()
    )
    engine = AsyncLLM.from_engine_args(arguments)
    started = asyncio.Condition()
    progress: dict[str, int] = {}

    async def one(name: str, ids: list[int], tokens: int, request: Any) -> Any:
        output = None
        async for output in engine.generate(
            {"prompt_token_ids": ids}, sampling(tokens), request_id=name, lora_request=request
        ):
            async with started:
                progress[name] = len(output.outputs[0].token_ids)
                started.notify_all()
        return seen(output)

    def all_prompts(name: str, request: Any, tokens: int = SHORT) -> Any:
        return asyncio.gather(
            *(one(f"{name}{i}", ids, tokens, request) for i, ids in enumerate(PROMPTS))
        )

    def update(trainer: Trainer, receipt: Any) -> Any:
        return adapter.update_lora(engine, trainer.spec.name, receipt, timeout_s=TIMEOUT_S)

    result: dict[str, Any] = {}
    for trainer in (policy, critic):
        await adapter.attach_lora(
            engine, trainer.spec, trainer.plan, trainer.transport, timeout_s=TIMEOUT_S
        )
    first = await update(policy, policy.publish(1))
    result["one"] = await all_prompts("reference", first, LONG)
    flying = asyncio.ensure_future(all_prompts("flying", first, LONG))
    async with started:
        await started.wait_for(lambda: all(progress.get(f"flying{i}", 0) >= 10 for i in range(3)))
    second = await update(policy, policy.publish(2))
    result["in_use"] = await failing(adapter.remove_lora(engine, first, timeout_s=TIMEOUT_S))
    third = policy.publish(3)
    policy.flip(3)
    result["corrupt"] = await failing(update(policy, third))
    result["two"] = await all_prompts("new", second)
    result["still_flying"] = not flying.done()
    result["flown"] = await flying
    result["critic"] = await all_prompts("critic", await update(critic, critic.publish(1)), LONG)
    await adapter.remove_lora(engine, first, timeout_s=TIMEOUT_S)
    late = asyncio.ensure_future(one("late", PROMPTS[0], SHORT, first))
    await asyncio.wait([late])
    result["refused"] = refused(late.result)
    result["two_again"] = await all_prompts("again", second)
    engine.shutdown()
    for trainer in (policy, critic):
        trainer.transport.close()
    return result


class BreaksOnce(LoraWorkerExtension):
    """Workers of which the second fails once to take an adapter."""

    rank: int

    def break_second(self) -> None:
        manager = self.model_runner.lora_manager
        stock = manager.add_adapter

        def broken(request: Any) -> None:
            manager.add_adapter = stock
            raise RuntimeError("no memory")

        if self.rank == 1:
            manager.add_adapter = broken

    def held_here(self) -> int:
        return len(self.model_runner.lora_manager.list_adapters())


def workers(folder: Path, dtype: str) -> dict[str, Any]:
    """Two workers with parts of each layer: they hold a version both, or none does."""
    import vllm
    from vllm.lora.request import LoRARequest

    policy, critic = trainers(folder / "workers", dtype)
    extension = {"worker_extension_cls": f"{Path(__file__).stem}.{BreaksOnce.__name__}"}
    settings = {**ENGINE, **adapter.lora_engine_args(), **extension, "tensor_parallel_size": 2}
    llm = vllm.LLM(str(folder / "model"), dtype=dtype, **settings)
    adapter.attach_lora_llm(llm, policy.spec, policy.plan, policy.transport)
    receipt = policy.publish(1)

    def update() -> Any:
        return adapter.update_lora_llm(llm, "policy", receipt, timeout_s=TIMEOUT_S)

    llm.collective_rpc("break_second")
    result: dict[str, Any] = {
        "broken": error_of(update),
        "rolled_back": llm.collective_rpc("held_here"),
    }
    result["synced"] = greedy(llm, update())
    result["held"] = llm.collective_rpc("held_here")
    result["disk"] = greedy(llm, LoRARequest("disk", 1, policy.save(1)))
    policy.transport.close()
    critic.transport.close()
    return result


if __name__ == "__main__":
    register()
    dtype, folder, cases = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    for case in cases:
        outcome = globals()[case](folder, dtype)
        saw = asyncio.run(outcome) if case == "running" else outcome
        (folder / f"{case}.json").write_text(json.dumps(saw))
