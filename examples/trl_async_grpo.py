"""Train TRL's AsyncGRPOTrainer on rollouts of an `AsyncLoop`, and update vLLM with a publisher.

    python examples/trl_async_grpo.py

A mixture-of-experts model with random weights learns to answer any prompt with even token ids. The
reward is the share of even token ids, which is 0.5 at the start. TRL 1.16 trains the model. An
`AsyncLoop` makes the rollouts and limits the staleness. The weights are sent to the running engine
through shared memory, mostly as deltas. With `--kill-at STEP`, the script kills the engine after
STEP steps, and the run must end with an error.
"""

import argparse
import itertools
import logging
import os
import random
import signal
import statistics
import tempfile
import time

# What vLLM needs on a CPU: no model hub, no compilation, one thread.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

import torch
from async_grpo import trl_on_cpu
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig

from primeblocks import async_loop, losses, weightsync
from primeblocks.async_loop.adapters.trl import EventThread, TrlWorker
from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args
from primeblocks.errors import PrimeblocksError
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters import vllm as into_vllm
from primeblocks.weightsync.adapters.trl import TrlTransfer

MODEL = {"num_layers": 2, "hidden": 64, "num_experts": 8, "top_k": 2, "vocab": 64, "init_std": 0.1}
STEPS, PROMPTS, GROUP, LR = 80, 8, 8, 3e-3
PROMPT, ANSWER = 4, 8  # tokens
MAX_OFF_POLICY_STEPS, FULL_EVERY = 2, 4
TIMEOUT_S, START_S = 60.0, 600.0


def reward_of(answer: tuple[int, ...]) -> float:
    """Return the share of even tokens in an answer."""
    return statistics.mean(float(token % 2 == 0) for token in answer)


class Rollouts:
    """Samples rollouts with the engine, and computes the rewards."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    async def one(self, prompt: list[int], *, version: int, sample: int = 0) -> async_loop.Rollout:
        (answer,) = await self.engine.generate(
            prompt,
            max_tokens=ANSWER,
            cache_salt=async_loop.cache_salt(version),
            timeout_s=TIMEOUT_S,
        )
        reward = reward_of(answer.token_ids)
        return answer.to_rollout(prompt_id=tuple(prompt), reward=reward)


class Watch(TrainerCallback):
    """Prints TRL's logs, and kills the engine if you pass `--kill-at`."""

    def __init__(self, engine: VllmEngine, kill_at: int | None) -> None:
        self.engine, self.kill_at, self.killed_at = engine, kill_at, 0.0
        self.rewards: list[float] = []

    def on_log(self, _args, state, _control, logs=None, **_kwargs) -> None:
        if "reward" not in logs:  # TRL's summary at the end.
            return
        self.rewards.append(logs["reward"])
        if state.global_step % 10 == 1:
            print(
                f"step {state.global_step:3}  reward {logs['reward']:.3f}  "
                f"ratio {logs['ratio']:.4f}  kl {logs['kl']:.2e}  "
                f"staleness {logs['sample/staleness_max']:.0f}  "
                f"wait {logs['perf/rollout_wait_s']:.2f} s  "
                f"weights {logs.get('perf/weight_sync_s', 0):.2f} s",
                flush=True,
            )

    def on_step_begin(self, _args, state, _control, **_kwargs) -> None:
        if state.global_step == self.kill_at:
            self.killed_at = time.monotonic()
            for pid in self.engine.pids:
                os.kill(pid, signal.SIGKILL)


def draw_prompts(seed: int):
    chance = random.Random(seed)
    for _ in itertools.count():
        yield [chance.randrange(4, MODEL["vocab"]) for _ in range(PROMPT)]


def run(options: argparse.Namespace, folder: str, thread: EventThread, transport) -> None:
    path = str(tiny_models.save("qwen3_moe", f"{folder}/model", **MODEL))
    arguments = base_engine_args(
        path, seed=0, dtype="bfloat16", max_model_len=64, max_num_seqs=64, kv_bytes=64 << 20
    )
    start = VllmEngine.start(arguments | into_vllm.engine_args(), timeout_s=START_S)
    engine = thread.call(start, timeout_s=START_S + TIMEOUT_S)
    worker = TrlWorker(
        thread,
        prompts=draw_prompts(seed=0),
        generate=Rollouts(engine).one,
        buffer=async_loop.RolloutBuffer(
            capacity=(MAX_OFF_POLICY_STEPS + 1) * PROMPTS,
            staleness=async_loop.StalenessPolicy(
                MAX_OFF_POLICY_STEPS, on_stale="wait", correction="TRL's ratio to the engine's"
            ),
        ),
        advantages=losses.advantages.group_advantages,
        batch_size=PROMPTS,
        group_size=GROUP,
        max_in_flight=64,
        step_timeout_s=TIMEOUT_S,
    )
    transfer = TrlTransfer(
        transport,
        attach=lambda plan: into_vllm.attach(engine.llm, plan, transport, timeout_s=TIMEOUT_S),
        update=lambda receipt: engine.call(
            into_vllm.update(engine.llm, receipt, in_flight="continue", timeout_s=TIMEOUT_S),
            timeout_s=TIMEOUT_S,
        ),
        run=thread.call,
        full_every=FULL_EVERY,
        timeout_s=2 * TIMEOUT_S,
    )
    config = AsyncGRPOConfig(
        **worker.config_args(),
        output_dir=folder,
        max_steps=options.steps,
        learning_rate=LR,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        seed=0,
    )
    watch = Watch(engine, options.kill_at)
    trainer = trl_on_cpu.build(
        model=path,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""]}),  # Not read. The worker has the prompts.
        rollout_worker=worker,
        weight_transfer=transfer,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    began = time.monotonic()
    try:
        trainer.train()
    except PrimeblocksError as error:
        if options.kill_at is None:
            raise
        after_s = time.monotonic() - watch.killed_at
        print(f"{after_s:.1f} s after the kill: {type(error).__name__}: {error}")
        return
    finally:
        thread.call(engine.close(), timeout_s=TIMEOUT_S)
    seconds = time.monotonic() - began
    few = max(1, options.steps // 6)
    first, last = (statistics.mean(part) for part in (watch.rewards[:few], watch.rewards[-few:]))
    deltas = statistics.mean(receipt.bytes for receipt in transfer.receipts)
    print(
        f"reward of the first {few} steps {first:.3f}, of the last {few} {last:.3f}; "
        f"{transfer.version} versions, {deltas:,.0f} bytes each of {transfer.receipts[0].bytes:,}; "
        f"{seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kill-at", type=int, help="kill the engine after so many steps")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    transport = weightsync.SharedMemoryTransport(f"trl-{os.getpid()}", owner=True)
    with tempfile.TemporaryDirectory() as folder, transport, EventThread() as thread:
        run(options, folder, thread, transport)


if __name__ == "__main__":
    main()
