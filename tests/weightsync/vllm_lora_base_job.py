"""Run by test_vllm_lora_base.py in a process of its own: `vllm_lora_base_job.py FOLDER`.

New base weights into an engine that has LoRA on. FOLDER/base-0 and -1 are checkpoints; writes
FOLDER/base.json.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from primeblocks.plugins.vllm import register
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from primeblocks.weightsync.adapters import vllm as adapter
from primeblocks.weightsync.adapters.vllm import lora
from tests.weightsync.contents import flip_sent
from tests.weightsync.vllm_lora_job import ENGINE, TIMEOUT_S, Trainer, error_of, greedy


class Base:
    """A trainer of all weights, on one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "weights"
        self.root.mkdir()
        self.model = self.checkpoint(0)
        source = describe(self.model)
        self.plan = plan_sync([source], source.whole(), bucket_bytes=1 << 16)
        self.transport = SharedMemoryTransport("base", owner=True, root=str(self.root))
        self.publisher = Publisher(self.plan, self.model, self.transport)

    def checkpoint(self, seed: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / f"base-{seed}")

    def publish(self, version: int, *, seed: int) -> Any:
        self.model.load_state_dict(self.checkpoint(seed).state_dict())
        return self.publisher.publish(version, timeout_s=TIMEOUT_S)

    def flip(self, version: int) -> None:
        flip_sent(self.transport, self.root, version, -12345)


def updated(folder: Path, base: Base, policy: Trainer) -> dict[str, Any]:
    """One engine, from seed 0 to seed 1 and back, with an adapter beside it."""
    import vllm

    llm = vllm.LLM(str(folder / "base-0"), dtype="float32", **ENGINE, **lora.lora_engine_args())
    core = llm.llm_engine.engine_core.engine_core.model_executor
    model = core.driver_worker.worker.get_model()
    wrapped = [name for name, _ in model.named_parameters() if ".base_layer." in name]
    adapter.attach_llm(llm, base.plan, base.transport)
    lora.attach_lora_llm(llm, policy.spec, policy.plan, policy.transport)
    one = lora.update_lora_llm(llm, "policy", policy.publish(1), timeout_s=TIMEOUT_S)

    def both() -> list[Any]:
        return [greedy(llm), greedy(llm, one)]

    def update(receipt: Any) -> list[str]:
        return error_of(lambda: adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S))

    result: dict[str, Any] = {"wrapped": len(wrapped), "start": both()}
    first = base.publish(1, seed=1)
    base.flip(1)
    result["corrupt"], result["after_corrupt"] = update(first), both()
    base.flip(1)
    result["error"], result["updated"] = update(first), both()
    # The adapter's next version, over weights that the engine did not start with.
    two = lora.update_lora_llm(llm, "policy", policy.publish(2), timeout_s=TIMEOUT_S)
    result["two"] = greedy(llm, two)

    second = base.publish(2, seed=0)
    whole = model.load_weights
    calls: list[int] = []

    def without_last(tensors: Any) -> Any:
        calls.append(1)
        items = list(tensors)
        return whole(items if len(calls) > 1 else items[:-1])

    model.load_weights = without_last
    result["partial"], result["after_partial"] = update(second), both()
    model.load_weights = whole
    result["error_back"], result["back"] = update(second), both()
    llm.llm_engine.engine_core.shutdown()
    return result


def fresh(folder: Path, policy: Trainer) -> dict[str, Any]:
    """Seed 1 and PEFT's folders, loaded by a stock engine."""
    import vllm
    from vllm.lora.request import LoRARequest

    llm = vllm.LLM(str(folder / "base-1"), dtype="float32", enable_lora=True, **ENGINE)
    requests = [LoRARequest(f"disk-{n}", n, policy.save(n)) for n in (1, 2)]
    return {"fresh": [greedy(llm), *(greedy(llm, request) for request in requests)]}


def main(folder: Path) -> None:
    root = folder / "lora" / "memory"
    root.mkdir(parents=True)
    (folder / "model").symlink_to(folder / "base-0")  # where Trainer looks
    transport = SharedMemoryTransport("lora", owner=True, root=str(root))
    base, policy = Base(folder), Trainer("policy", "float32", transport, root)
    result = updated(folder, base, policy)
    # Now: collected while the next engine starts, this one would end the groups of that one.
    gc.collect()
    result |= fresh(folder, policy)
    (folder / "base.json").write_text(json.dumps(result))
    transport.close()
    base.transport.close()


if __name__ == "__main__":
    register()
    main(Path(sys.argv[1]))
