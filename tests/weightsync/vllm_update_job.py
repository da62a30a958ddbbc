"""Run by test_vllm_update.py in a process of its own: `vllm_update_job.py DTYPE FOLDER`.

Writes FOLDER/DTYPE.json, what was seen. Checkpoints FOLDER/<dtype>-0 and -1 are there.
"""

import json
import sys
from pathlib import Path
from typing import Any

from primeblocks.errors import PrimeblocksError
from primeblocks.plugins.vllm import register
from primeblocks.weightsync.adapters import vllm as adapter
from tests.weightsync.vllm_job import ENGINE, PROMPTS, TIMEOUT_S, Trainer, sampling, seen


def greedy(llm: Any) -> list[Any]:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [seen(o) for o in llm.generate(prompts, sampling(24), use_tqdm=False)]


def error_of(call: Any) -> list[str]:
    try:
        call()
    except PrimeblocksError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


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


if __name__ == "__main__":
    register()
    dtype, folder = sys.argv[1], Path(sys.argv[2])
    (folder / f"{dtype}.json").write_text(json.dumps(offline(folder, dtype)))
