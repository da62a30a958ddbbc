"""Train a mixture-of-experts model with asynchronous GRPO and a real vLLM, on a laptop.

    torchrun --nproc-per-node 2 examples/async_grpo_moe.py

The model learns to write a few words of Python's own documentation backwards. First, a short
supervised training on demonstrations teaches the model to write letters. Half of the demonstrations
copy the text instead of reversing the text, so the reward must teach the model to reverse. FSDP2
splits the dense weights over the two trainer ranks, and each rank has half of the experts. While
the trainer trains, vLLM samples in its own process. After every optimizer step, the trainer ranks
send their shards to the running engine. With `--state FOLDER`, you can start a killed run again,
and the run continues from its last saved step.

Several nodes do not need shared memory or shared files, because the weights are sent over TCP. Run
this command on each node:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-id RUN --rdzv-backend c10d \
        --rdzv-endpoint FIRST_NODE:29400 examples/async_grpo_moe.py

For your own experiment, change the constants in this file. The engine uses a GPU if the machine has
a GPU. The trainer uses GPUs if the machine has one GPU for the engine and one GPU per trainer rank.
With fewer GPUs, the trainer uses the CPU.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

# Settings for vLLM on a CPU, before the import of vLLM: no model hub, one process besides this one,
# no compilation, one thread (the model is tiny, and the trainer needs the other cores).
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
import torch.distributed as dist
from async_grpo.nodes import checkpoint_on_all, transport_between_ranks
from async_grpo.saved import WARM_VERSION, SavedRun
from async_grpo.task import snippets
from async_grpo.trainer import LOSSES, SEED, Trainer, follow, on_all_ranks
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from primeblocks import async_loop
from primeblocks.testing import tiny_models

# --- the task: see async_grpo/task.py; the engine: rollouts.py; the trainer's ranks: trainer.py ---
# --- the model ---
MODEL = {"num_layers": 2, "hidden": 128, "num_experts": 8, "top_k": 2, "vocab": 64}
# --- warm start ---
WARM_STEPS = 350
# --- reinforcement learning ---
STEPS, PROMPTS, GROUP = 100, 16, 8
MAX_OFF_POLICY_STEPS = 2
MAX_IN_FLIGHT = 24  # groups
PROBE_EVERY = 10  # steps between measurements of the mismatch
TIMEOUT_S, START_S = 120.0, 600.0  # of the engine, on a busy machine too


# --- rank 0: the loop ----------------------------------------------------------------------------


async def probe(trainer: Trainer, rollouts, texts: list[str], version: int) -> tuple:
    """Measure the mismatch of engine and trainer at one version, on new rollouts of `texts`."""
    fresh = await rollouts.each(texts, version=version)
    return version, *await asyncio.to_thread(on_all_ranks, trainer, "mismatch", fresh)


async def drive(trainer: Trainer, checkpoint: Path, options: argparse.Namespace) -> None:
    """Run the experiment on rank 0: warm start, engine, loop and measurements."""
    # Imported here, because the other ranks do not need vLLM.
    import vllm
    from async_grpo.report import record_of, report
    from async_grpo.rollouts import Rollouts, engine_arguments

    from primeblocks.async_loop.adapters.vllm import VllmEngine
    from primeblocks.kvoffload.adapters.vllm import engine_statistics
    from primeblocks.weightsync.adapters import vllm as weightsync_vllm

    start = time.monotonic()
    training, held_out = snippets(SEED)
    run = SavedRun(options.state)
    if run.version - WARM_VERSION >= options.steps:
        sys.exit(f"the run in {run.folder} has made its {options.steps} steps")
    if run.weights is None:
        on_all_ranks(trainer, "warm_start", training, options.warm_steps)
    else:
        on_all_ranks(trainer, "load", run.weights)
    config = trainer.model.config
    arguments = engine_arguments(
        checkpoint,
        config,
        max_requests=MAX_IN_FLIGHT * GROUP,
        max_off_policy_steps=options.max_off_policy_steps,
        use_exact=options.exact,
    )
    history, probes, receipts, sync_seconds = [], [], [], []
    async with await VllmEngine.start(arguments, timeout_s=START_S) as engine:
        rollouts = Rollouts(engine)
        await weightsync_vllm.attach(
            engine.llm, trainer.sync_plan, trainer.transport, timeout_s=TIMEOUT_S
        )

        async def publish(version: int) -> None:
            began = time.monotonic()
            receipts.append(await asyncio.to_thread(on_all_ranks, trainer, "publish", version))
            await weightsync_vllm.update(
                engine.llm, receipts[-1], in_flight="continue", timeout_s=TIMEOUT_S
            )
            sync_seconds.append(time.monotonic() - began)

        def train(groups, *, version: int) -> dict[str, float]:
            return on_all_ranks(trainer, "train", groups)

        await publish(run.version)
        reward_before = await rollouts.greedy_reward(held_out, version=run.version)
        chance = random.Random(SEED + 99)
        loop = async_loop.AsyncLoop(
            prompts=(chance.choice(training) for _ in itertools.count()),
            generate=rollouts.one,
            train=train,
            publish=publish,
            buffer=async_loop.RolloutBuffer(
                capacity=(options.max_off_policy_steps + 1) * PROMPTS,
                staleness=async_loop.StalenessPolicy(
                    options.max_off_policy_steps,
                    on_stale="wait",  # A hard bound. Answers have similar lengths.
                    correction=f"{options.loss}, with the engine's log-probabilities",
                ),
            ),
            batch_size=PROMPTS,
            max_in_flight=MAX_IN_FLIGHT * GROUP,
            group_size=GROUP,
            ledger=run.journal,
            version=run.version,
            step_timeout_s=TIMEOUT_S,
        )
        began = time.monotonic()
        async with loop:
            bar = tqdm(total=options.steps, initial=run.version - WARM_VERSION, desc="GRPO")
            async for step in loop.steps(options.steps - bar.n):
                history.append(record_of(step, at_s=time.monotonic() - began))
                if len(history) % PROBE_EVERY == 0 or bar.n + 1 == options.steps:
                    probes.append(await probe(trainer, rollouts, held_out[:64], step.version))
                await run.save(partial(on_all_ranks, trainer, "save"), version=step.version)
                shown = {"reward": history[-1]["reward"], "KL": probes[-1][2] if probes else 0}
                bar.set_postfix(shown | {"staleness": max(step.staleness)}, refresh=False)
                bar.update()
            bar.close()
        loop_seconds = time.monotonic() - began
        reward_after = await rollouts.greedy_reward(held_out, version=loop.version)
        pages = engine_statistics()
    on_all_ranks(trainer, "close")
    run.close()
    summary = {
        "engine": f"vllm-{vllm.__version__}",
        "reward_before": reward_before,
        "reward_after": reward_after,
        "first_version": run.version,
        "steps": len(history),
        "versions_seen": len(set().union(*(record["versions"] for record in history))),
        "max_off_policy_steps": options.max_off_policy_steps,
        "max_staleness_seen": max(max(record["staleness"]) for record in history),
        "mismatch_kl_without_replay": statistics.mean(kl for _, kl, _, _ in probes),
        "mismatch_kl_with_replay": statistics.mean(kl for _, _, kl, _ in probes),
        "route_agreement": statistics.mean(agreement for *_, agreement in probes),
        "sync_seconds_median": statistics.median(sync_seconds),
        "sync_bytes": receipts[-1].bytes,
        "tokens_per_second": rollouts.tokens / loop_seconds,
        "kv_store_hits": pages.hits,
        "kv_store_tokens": pages.tokens,
        "dropped": sum(record["dropped"] for record in history),
        "positions_computed": statistics.mean(record["positions_computed"] for record in history),
        "fp8": options.fp8,
        "exact": options.exact,
        "trees": options.trees,
        "loss": options.loss,
        "loop_seconds": loop_seconds,
        "seconds": time.monotonic() - start,
    }
    report(summary, history, probes, options.out)


def trainer_device() -> torch.device:
    """Return the CPU, or a GPU for this rank alone if the node has enough GPUs."""
    if torch.cuda.device_count() <= int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", 1 + int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS)
    parser.add_argument("--max-off-policy-steps", type=int, default=MAX_OFF_POLICY_STEPS)
    parser.add_argument("--loss", choices=LOSSES, default="grpo")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"))
    parser.add_argument(
        "--state",
        type=Path,
        help="save the run here, and go on from what is here; several nodes have to share it",
    )
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument(
        "--fp8",
        action="store_true",
        help="FP8 attention projections and experts in the trainer; the engine gets their rounded "
        "values in bfloat16, because on a CPU vLLM 0.32 runs FP8 weights only with AMX",
    )
    one_of.add_argument(
        "--exact",
        action="store_true",
        help="float32 and one order of additions on both sides: the mismatch is 0, and it is slow",
    )
    one_of.add_argument(
        "--trees",
        action="store_true",
        help="compute the prompt that a group shares once, where its routes agree",
    )
    options = parser.parse_args()
    # torchrun ends the other ranks with SIGTERM. They exit as after an error, and clean up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    disable_progress_bar()
    torch.set_num_threads(1)
    device = trainer_device()
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    # Ranks wait in a collective while rank 0 starts the engine and attaches it.
    dist.init_process_group(backend, timeout=timedelta(seconds=2 * START_S))
    folder = tempfile.TemporaryDirectory(prefix="primeblocks-")
    checkpoint = Path(folder.name) / "checkpoint"
    checkpoint_on_all(checkpoint, partial(tiny_models.save, "qwen3_moe", seed=SEED, **MODEL))
    transport = transport_between_ranks()
    trainer = Trainer(
        checkpoint,
        device,
        transport,
        use_fp8=options.fp8,
        use_exact=options.exact,
        use_trees=options.trees,
        loss=options.loss,
    )
    if trainer.rank == 0:
        asyncio.run(drive(trainer, checkpoint, options))
    else:
        follow(trainer)
    dist.barrier()  # Else a rank may abort at its end: Gloo drops the last tensors in a thread.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
