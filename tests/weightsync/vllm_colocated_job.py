"""Run by test_vllm_colocated.py in a process of its own: `vllm_colocated_job.py FOLDER`.

Takes turns with a real `LLM` and writes what it saw to FOLDER/seen.json. On a CPU vLLM goes through
the motions of sleeping and keeps its memory, so no bytes are measured here.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from primeblocks.weightsync.adapters import vllm as into_vllm
from primeblocks.weightsync.engines.colocated import Colocated, ColocatedEngine

SIZES = {"num_layers": 2, "hidden": 64}
TIMEOUT_S = 60


def main(folder: Path) -> None:
    register()
    import vllm

    start = folder / "start"
    tiny_models.save("qwen3_moe", start, seed=0, dtype="float32", **SIZES)
    options = {"enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True}
    llm = vllm.LLM(str(start), max_num_seqs=4, **options, **into_vllm.engine_args())
    model = tiny_models.build("qwen3_moe", seed=1, dtype="float32", **SIZES)
    source = describe(model)
    plan = plan_sync([source], source.whole(), bucket_bytes=1 << 16)
    transport = SharedMemoryTransport("policy", owner=True, root=str(folder))
    publisher = Publisher(plan, model, transport)
    calls: list[list[object]] = []

    def call(name: str, act: object) -> None:
        calls.append([name, act, llm.llm_engine.is_sleeping()])

    def update(receipt, timeout_s):
        # Attached anew, because a worker that holds the version would not load it again.
        into_vllm.attach_llm(llm, plan, transport)
        into_vllm.update_llm(llm, receipt, timeout_s=timeout_s)
        call("update", None)

    engine = ColocatedEngine(
        sleep=lambda s: call("sleep", llm.sleep(level=2)),
        wake=lambda part, s: call(part, llm.wake_up(tags=[part])),
        update=update,
    )
    colocated = Colocated(
        trainer=SimpleNamespace(release=lambda: None, restore=lambda: None),
        engine=engine,
        publish=lambda version, s: publisher.publish(version, timeout_s=s),
        memory=int,
    )

    def tokens() -> list[int]:
        sampling = vllm.SamplingParams(
            max_tokens=12, temperature=0, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": [1, 5, 7, 9]}
        return list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    seen = [tokens()]
    engine.sleep(TIMEOUT_S)
    for version in (1, 2):
        colocated.to_engine(version, timeout_s=TIMEOUT_S)
        seen.append(tokens())
        colocated.to_trainer(timeout_s=TIMEOUT_S)
        with torch.no_grad():
            for mine in model.parameters():
                mine.mul_(1.5)
    publisher.close()
    transport.close()
    (folder / "seen.json").write_text(json.dumps({"tokens": seen, "calls": calls}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
