"""Train an agent that solves equations with a calculator, with and without router replay.

    python examples/reasoning_gym_grpo.py

The questions and the function that scores answers come from `simple_equations` of reasoning-gym.
The model is a tiny mixture of experts. In each turn, the model calls a calculator in a sandboxed
process and reads the result, or gives its answer. Most equations need three turns. First, the model
learns from demonstrations how to write a call of the calculator. Half of the demonstrations use a
wrong operation, so the score must teach the model the right operation. After the demonstrations,
the script runs asynchronous GRPO twice. In the first run, the trainer imposes the engine's experts.
In the second run, the trainer uses its own choices of experts. The script kills each run once with
SIGKILL, and starts the run again from its last saved step. The script writes its results to
`curve.json` and `curve.svg` in `outputs/reasoning_gym`.

On GPUs, start each run separately. Run this command on each node:

    torchrun --nnodes 2 --nproc-per-node RANKS --rdzv-id RUN --rdzv-backend c10d \
        --rdzv-endpoint FIRST_NODE:29400 examples/reasoning_gym_grpo.py --arm replay --out SHARED

The folder `async_grpo` contains the files `equations`, `calculator`, `episodes`, `trainer`, `saved`
and `curve` of this example.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import async_grpo_moe as demo  # First, because it sets environment variables for vLLM.
import psutil
import torch
import torch.distributed as dist
from async_grpo import curve
from async_grpo.calculator import Calculator
from async_grpo.nodes import checkpoint_on_all, transport_between_ranks
from async_grpo.saved import WARM_VERSION, SavedRun
from async_grpo.trainer import Trainer, follow, on_all_ranks
from tqdm import tqdm
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from primeblocks import async_loop
from primeblocks.capture.adapters.transformers import ChatTemplate
from primeblocks.testing import tiny_models

# --- the size. At the right: Qwen3-30B-A3B on two nodes with five H200 each, never run ---
CHECKPOINT = None  # None makes a tiny Qwen3-MoE.  "/models/Qwen3-30B-A3B-Instruct-2507"
RANKS = 2  # of the trainer, per node              4; the engine has the first node's first GPU
WARM_STEPS = 300  #                                0; the checkpoint can call tools
LR = 3e-4  #                                       1e-6
MAX_TOKENS = 48  # of a turn                       256
MAX_LENGTH = 256  # tokens of an episode           1024
KV_BYTES = 128 << 20  #                            10 << 30
MODEL = {"num_layers": 2, "hidden": 128, "num_experts": 8, "top_k": 2, "vocab": 4096}
# --- warm start ---
WARM_BATCH, WARM_LR, WRONG = 32, 2e-3, 0.5
# --- reinforcement learning ---
STEPS, PROMPTS, GROUP, MAX_TURNS = 80, 16, 8, 4
MAX_OFF_POLICY_STEPS, MAX_IN_FLIGHT = 2, 24  # steps, groups
PROBE_EVERY, PROBED = 5, 32  # steps between measurements of the mismatch, questions
TIMEOUT_S, START_S = 120.0, 600.0
# --- the comparison ---
ARMS = {"replay": "with replay", "own": "without replay"}
KILL_AT = 45  # steps
OUT = Path("outputs/reasoning_gym")


# --- one arm: rank 0, and the others -------------------------------------------------------------


async def warm_start(trainer: Trainer, episodes, options: argparse.Namespace) -> None:
    """Train on demonstrations of calculator calls. Half of the demonstrations are wrong."""
    chance = random.Random(options.seed)
    steps = options.warm_steps
    for step in tqdm(range(steps), desc="warm start"):
        chosen = chance.sample(episodes.questions.training, WARM_BATCH)
        rows = [await episodes.demonstration(i, wrong=chance.random() < WRONG) for i in chosen]
        share = min(1.0, (step + 1) / 50, 2 * (steps - step) / steps)  # Warm-up, constant, decay.
        on_all_ranks(trainer, "imitate_share", rows, WARM_LR * share)


async def drive(trainer: Trainer, checkpoint: Path, options: argparse.Namespace) -> None:
    """Run one arm of the comparison on rank 0: warm start, engine, loop, and a log of each step."""
    # Imported here, because the other ranks do not need vLLM.
    from async_grpo.episodes import Episodes, engine_arguments
    from async_grpo.equations import Questions

    from primeblocks.async_loop.adapters.vllm import VllmEngine
    from primeblocks.weightsync.adapters import vllm as weightsync_vllm

    folder, warm = options.out / options.arm, options.out / "warm"
    run, config, calculator = SavedRun(folder / "state"), trainer.model.config, Calculator()
    questions = Questions(options.seed)
    template = ChatTemplate(AutoTokenizer.from_pretrained(checkpoint))
    episodes = Episodes(
        questions,
        template,
        calculator,
        max_turns=MAX_TURNS,
        max_tokens=MAX_TOKENS,
        max_length=MAX_LENGTH,
    )
    if run.weights is None and not warm.exists():
        await warm_start(trainer, episodes, options)
        on_all_ranks(trainer, "save", warm)  # Both arms continue from these weights.
    else:
        on_all_ranks(trainer, "load", run.weights or warm)
    arguments = engine_arguments(
        checkpoint,
        config,
        max_length=MAX_LENGTH,
        max_requests=MAX_IN_FLIGHT * GROUP,
        kv_bytes=KV_BYTES,
    )
    async with await VllmEngine.start(arguments, timeout_s=START_S) as engine:
        episodes.engine = engine
        await weightsync_vllm.attach(
            engine.llm, trainer.sync_plan, trainer.transport, timeout_s=TIMEOUT_S
        )

        async def publish(version: int) -> None:
            receipt = await asyncio.to_thread(on_all_ranks, trainer, "publish", version)
            await weightsync_vllm.update(
                engine.llm, receipt, in_flight="continue", timeout_s=TIMEOUT_S
            )

        def train(groups, *, version: int) -> dict[str, float]:
            return on_all_ranks(trainer, "train", groups)

        async def mismatch(version: int) -> tuple[float, float, float]:
            fresh = await episodes.each(questions.held_out[:PROBED], version=version)
            return await asyncio.to_thread(on_all_ranks, trainer, "mismatch", fresh)

        await publish(run.version)
        log = curve.Log(folder / "log.jsonl", first=WARM_VERSION, version=run.version)
        if run.version == WARM_VERSION:
            before = await episodes.solved_greedily(version=run.version)
            log.write(version=run.version, solved_greedily=before)
        chance = random.Random(options.seed + 99)
        loop = async_loop.AsyncLoop(
            # After a kill, the questions and their order are equal, because the journal counts
            # questions.
            prompts=(chance.choice(questions.training) for _ in itertools.count()),
            generate=episodes.one,
            train=train,
            publish=publish,
            buffer=async_loop.RolloutBuffer(
                capacity=(MAX_OFF_POLICY_STEPS + 1) * PROMPTS,
                staleness=async_loop.StalenessPolicy(
                    MAX_OFF_POLICY_STEPS,
                    on_stale="wait",
                    correction="GRPO's ratio to the engine's log-probabilities",
                ),
            ),
            batch_size=PROMPTS,
            max_in_flight=MAX_IN_FLIGHT * GROUP,
            group_size=GROUP,
            ledger=run.journal,
            version=run.version,
            step_timeout_s=TIMEOUT_S,
        )
        async with loop:
            bar = tqdm(total=options.steps, initial=run.version - WARM_VERSION, desc=options.arm)
            async for step in loop.steps(options.steps - bar.n):
                bar.update()
                is_due = bar.n % PROBE_EVERY == 0 or bar.n == options.steps
                record = log.write_step(step, await mismatch(step.version) if is_due else None)
                await run.save(partial(on_all_ranks, trainer, "save"), version=step.version)
                bar.set_postfix({"reward": record["reward"]} | step.postfix(), refresh=False)
            bar.close()
        after = await episodes.solved_greedily(version=loop.version)
        log.write(version=loop.version, solved_greedily=after, late_results=calculator.late)
    on_all_ranks(trainer, "close")
    await calculator.close()
    run.close()


def make_checkpoint(seed: int, folder: Path) -> None:
    """Save a tiny model, and a tokenizer from the package `mistral_common`."""
    from async_grpo.equations import make_tokenizer

    tiny_models.build("qwen3_moe", seed=seed, **MODEL).save_pretrained(folder)
    make_tokenizer(MODEL["vocab"]).save_pretrained(folder)


def be_a_rank(options: argparse.Namespace) -> None:
    """Run one rank of one arm (with or without replay), in a process that torchrun started."""
    disable_progress_bar()
    torch.set_num_threads(1)
    device = demo.trainer_device()
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    # Ranks wait in a collective while rank 0 starts the engine and attaches it.
    dist.init_process_group(backend, timeout=timedelta(seconds=2 * START_S))
    folder = tempfile.TemporaryDirectory(prefix="primeblocks-")
    checkpoint = Path(CHECKPOINT or folder.name)
    if CHECKPOINT is None:
        checkpoint_on_all(checkpoint, partial(make_checkpoint, options.seed))
    trainer = Trainer(
        checkpoint,
        device,
        transport_between_ranks(),
        use_replay=options.arm == "replay",
        recompute=CHECKPOINT is not None,  # The activations of a large model do not fit in a GPU.
        lr=LR,
    )
    if trainer.rank == 0:
        asyncio.run(drive(trainer, checkpoint, options))
    else:
        follow(trainer)
    dist.barrier()  # Else a rank may abort at its end: Gloo drops the last tensors in a thread.
    dist.destroy_process_group()


# --- both arms, each of them killed once ---------------------------------------------------------


def live(arm: str, options: argparse.Namespace, *, kill_at: int | None) -> int | None:
    """Run one arm (with or without replay) to its end, or kill it with SIGKILL after some steps.

    After `kill_at` steps, all processes of the arm are killed. Return the number of steps before
    the kill, or None without a kill.
    """
    run_id = f"{arm}-{os.getpid()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "--rdzv-id", run_id]
    command += ["--nproc-per-node", str(RANKS), __file__, "--arm", arm, "--out", str(options.out)]
    command += ["--steps", str(options.steps), "--warm-steps", str(options.warm_steps)]
    command += ["--seed", str(options.seed)]
    killed_at = None
    with psutil.Popen(command) as process:
        while process.poll() is None:
            time.sleep(0.2)
            made = sum("reward" in each for each in curve.lines(options.out / arm / "log.jsonl"))
            if killed_at is None and kill_at is not None and made >= kill_at:
                killed_at = made
                for each in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(signal.SIGKILL)
    for left in Path("/dev/shm").glob(f"primeblocks-demo-{run_id}-*"):
        shutil.rmtree(left)  # A killed run cannot remove its shared memory.
    if killed_at is None and process.returncode:
        sys.exit(f"the arm {arm!r} ended with exit code {process.returncode}")
    return killed_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS)
    parser.add_argument("--kill-at", type=int, default=KILL_AT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--arm", choices=ARMS, help="be one rank of one arm, under torchrun")
    options = parser.parse_args()
    if options.arm is not None:
        be_a_rank(options)
        return
    if (options.out / "curve.json").exists():
        sys.exit(f"the comparison in {options.out} is complete. Remove it, or pass another --out.")
    began, killed = time.monotonic(), {}
    for arm, name in ARMS.items():
        killed[name] = live(arm, options, kill_at=options.kill_at)
        live(arm, options, kill_at=None)
    logs = {name: curve.lines(options.out / arm / "log.jsonl") for arm, name in ARMS.items()}
    seconds = time.monotonic() - began
    summary = {"seed": options.seed, "seconds": seconds, "killed_after": killed, "arms": logs}
    (options.out / "curve.json").write_text(json.dumps(summary) + "\n")
    curve.draw(summary, options.out / "curve.svg")
    print(curve.table(summary))


if __name__ == "__main__":
    main()
