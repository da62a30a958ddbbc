"""Asynchronous GRPO of a mixture-of-experts model, on real vLLM, from real text, on a laptop.

    torchrun --nproc-per-node 2 examples/async_grpo_moe.py

The model learns to write a few words of Python's own documentation backwards. A short supervised
warm start teaches it the letters from poor demonstrations, half of which copy the text instead of
reversing it; the reward then tells which half was right. While the two trainer ranks learn (FSDP2
for the dense weights, each rank with half of the experts), vLLM goes on sampling in a process of
its own; after every optimizer step the ranks' shards go straight into the running engine.
With `--state FOLDER` a run that was killed and is started again goes on where it was.

On several nodes, which need share neither memory nor files, the weights go over TCP; on each:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-id RUN --rdzv-backend c10d \
        --rdzv-endpoint FIRST_NODE:29400 examples/async_grpo_moe.py

Everything an experiment would change is a constant below. The engine takes a GPU if there is one,
the trainer too where there is one more for each of its ranks; else it stays on the CPU.
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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

# What vLLM needs on a CPU, set before it is imported: no model hub, one process besides this one,
# no compilation, one thread (the model is tiny, and the trainer wants the other cores).
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
import torch.distributed.checkpoint as dcp
from async_grpo.nodes import checkpoint_on_all, transport_between_ranks
from async_grpo.saved import WARM_VERSION, SavedRun
from async_grpo.task import PAD, answer_of, prompt_of, snippets
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from primeblocks import async_loop, losses, parallel, replay, weightsync
from primeblocks.parallel.adapters.transformers import parallelize
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import tiny_models

# --- the task: see async_grpo/task.py; the engine: see async_grpo/rollouts.py ---
WRONG_DEMONSTRATIONS = 0.5
# --- the model ---
MODEL = {"num_layers": 2, "hidden": 128, "num_experts": 8, "top_k": 2, "vocab": 64}
SEED = 0
# --- warm start ---
WARM_STEPS, WARM_BATCH, WARM_LR = 350, 32, 1e-3
# --- reinforcement learning ---
STEPS, PROMPTS, GROUP, LR = 100, 16, 8, 3e-4
LOSSES = {
    "grpo": losses.grpo_loss,
    "aipo": losses.aipo_loss,
    "cispo": partial(losses.cispo_loss, clip_high=4.0),
    "gspo": partial(losses.gspo_loss, clip_low=0.03, clip_high=0.04),
    "sapo": losses.sapo_loss,
    "reinforce": partial(losses.cispo_loss, clip_low=0.0, clip_high=0.0),
}
MAX_OFF_POLICY_STEPS = 2
MAX_IN_FLIGHT = 24  # groups
PROBE_EVERY = 10  # steps between measurements of the mismatch
TIMEOUT_S = 120.0


# --- the trainer, one on each rank ---------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One rollout as a trainer rank needs it; routes are packed for the wire."""

    tokens: list[int]
    prompt_length: int
    logprobs: list[float]
    advantage: float
    routes: bytes


class Trainer:
    """Two ranks: dense weights sharded by FSDP2, experts dealt out, routes imposed."""

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        transport: weightsync.transports.Transport,
        *,
        use_fp8: bool = False,
        loss: str = "grpo",
    ) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.loss = LOSSES[loss]
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        whole = weightsync.describe(model, dtype=torch.bfloat16)  # what the engine holds
        transfer_encoding = None
        if use_fp8:
            from primeblocks import fp8
            from primeblocks.fp8.adapters.transformers import convert
            from primeblocks.fp8.simulated import SimulatedGemm

            # 32 rows: each rank's shard of every projection is a multiple of it.
            recipe = fp8.Recipe(weights=fp8.Tile(32, 128), gemm=SimulatedGemm())
            layers = convert(model, recipe, only=r"self_attn\.[qkvo]_proj|mlp\.experts")
        plan = parallel.plan_mesh(world_size=self.world_size, expert=self.world_size)
        self.meshes = plan.build(device.type)
        parallelize(model.to(device), self.meshes)
        held = weightsync.describe(model)
        if use_fp8:
            # In bfloat16: vLLM has no float8 kernels on a CPU.
            transfer_encoding = fp8.encode_weights(
                recipe,
                only=layers,
                layouts={name: tensor.layout for name, tensor in held.items()},
                form="simulated",
            )
        self.model, self.routers = model.train(), routers(model)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=WARM_LR, betas=(0.9, 0.95), weight_decay=0.0
        )
        if use_fp8:  # Each weight is rounded once a step, whatever number of passes use it.
            fp8.WeightCache(model, self.optimizer)
        sources = weightsync.convert.gather_manifests(held)
        self.sync_plan = weightsync.plan_sync(sources, whole, bucket_bytes=1 << 20)
        self.transport = transport
        self.publisher = weightsync.Publisher(
            self.sync_plan, model, self.transport, encode=transfer_encoding
        )
        if self.rank == 0:
            print(plan.table(), self.sync_plan.table(), sep="\n\n", flush=True)

    def warm_start(self, texts: list[str], steps: int) -> float:
        """Supervised steps on demonstrations of which some are wrong; returns the last loss."""
        chance = random.Random(SEED + 1 + self.rank)
        loss = torch.zeros(())
        for step in tqdm(range(steps), desc="warm start", disable=self.rank > 0):
            chosen = chance.sample(texts, WARM_BATCH // self.world_size)
            shown = [t if chance.random() < WRONG_DEMONSTRATIONS else t[::-1] for t in chosen]
            prompts = [prompt_of(text) for text in chosen]
            answers = [answer_of(answer) for answer in shown]
            rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            padded_rows = padded(rows, [len(prompt) for prompt in prompts])
            tokens, mask = (x.to(self.device) for x in padded_rows)
            count = parallel.global_token_count(mask.sum(), self.meshes)
            loss = -(self.logprobs(tokens) * mask).sum() / count
            loss.backward()
            self.apply_gradients(WARM_LR * min(1.0, (step + 1) / 50))
        return loss.item()

    def train(self, samples: list[Sample]) -> dict[str, float]:
        """One GRPO step; every rank takes its share of the samples."""
        mine = samples[self.rank :: self.world_size]
        tokens, mask, sampled_logprobs = tensors_of(mine, self.device)
        advantages = torch.tensor([s.advantage for s in mine], device=self.device)
        advantages = advantages[:, None].expand_as(mask)
        count = parallel.global_token_count(mask.sum(), self.meshes)
        with replay.impose(self.routers, routes_of(mine, tokens)):
            logprobs = self.logprobs(tokens)
            loss = self.loss(logprobs, sampled_logprobs, advantages, mask=mask)
            (loss.sum / count).backward()
        norm = self.apply_gradients(LR)
        clipped = parallel.global_token_count(loss.clipped, self.meshes)
        metrics = losses.corrections.off_policy_metrics(
            logprobs, sampled_logprobs, mask=mask, group=dist.group.WORLD
        )
        return metrics | {"tokens": count, "gradient_norm": norm, "clipped": clipped / count}

    def mismatch(self, samples: list[Sample]) -> tuple[float, float, float]:
        """k3 of engine against trainer without and with replay, and how many routes agree."""
        mine = samples[self.rank :: self.world_size]
        tokens, mask, sampled_logprobs = tensors_of(mine, self.device)
        routes = routes_of(mine, tokens)
        with torch.no_grad():
            with replay.record(self.routers) as tape:
                without = self.logprobs(tokens)
            with replay.impose(self.routers, routes):
                imposed = self.logprobs(tokens)
        real = (tokens != PAD).flatten().cpu().numpy()
        agreement = replay.compare(routes, tape.routes, mask=real).overall
        parts: list = [None] * self.world_size
        logprobs = (x[mask].cpu() for x in (without, imposed, sampled_logprobs))
        dist.all_gather_object(parts, (*logprobs, agreement))
        without, imposed, sampled = (torch.cat([part[i] for part in parts]) for i in range(3))
        return (
            replay.measure_mismatch(trainer_logprobs=without, rollout_logprobs=sampled).k3,
            replay.measure_mismatch(trainer_logprobs=imposed, rollout_logprobs=sampled).k3,
            statistics.mean(part[3] for part in parts),
        )

    def publish(self, version: int) -> weightsync.marker.Receipt:
        """Write this rank's shards of one version where the engine will read them."""
        return self.publisher.publish(version, timeout_s=TIMEOUT_S)

    def save(self, folder: Path) -> None:
        """Write weights and moments down, all or nothing; any number of ranks can go on there."""
        unfinished = folder.with_suffix(".unfinished")
        weights, moments = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)
        if self.rank == 0:
            unfinished.rename(folder)

    def load(self, folder: Path) -> None:
        """Go on from weights and moments that were saved."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
        )

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Log-probability of every token after the first, `[batch, tokens - 1]`."""
        # Padding is on the right, where causal attention cannot see it.
        logits = self.model(input_ids=tokens, use_cache=False).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
        return chosen[..., 0]

    def apply_gradients(self, lr: float) -> float:
        norm = parallel.clip_grad_norm_(
            self.model.parameters(), 1.0, meshes=self.meshes, optimizer=self.optimizer
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def close(self) -> None:
        self.publisher.close()
        self.transport.close()


def on_all_ranks(trainer: Trainer, method: str, *args):
    """Rank 0 calls a method of the trainer on every rank; see `follow`."""
    dist.broadcast_object_list([(method, args)], src=0)
    return getattr(trainer, method)(*args)


def follow(trainer: Trainer) -> None:
    """The other ranks do what rank 0 does, until it closes its trainer."""
    method = ""
    while method != "close":
        message: list = [None]
        dist.broadcast_object_list(message, src=0)
        method, args = message[0]
        getattr(trainer, method)(*args)


def padded(rows: list[list[int]], prompt_lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of tokens, and a mask of where `tokens[:, 1:]` is part of a completion."""
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    width = int(lengths.max())
    tokens = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    position = torch.arange(1, width)
    mask = (position >= torch.tensor(prompt_lengths)[:, None]) & (position < lengths)
    return tokens, mask


def tensors_of(samples: list[Sample], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    tokens, mask = padded([s.tokens for s in samples], [s.prompt_length for s in samples])
    sampled_logprobs = torch.zeros(mask.shape)
    sampled_logprobs[mask] = torch.tensor([x for sample in samples for x in sample.logprobs])
    return tokens.to(device), mask.to(device), sampled_logprobs.to(device)


def routes_of(samples: list[Sample], tokens: Tensor) -> replay.Routes:
    """One row for each token of the padded batch; padding visits all experts in turn."""
    rows = [replay.Routes.unpack(sample.routes) for sample in samples]
    return replay.Routes.join(rows, pad_to=tokens.shape[1])


# --- rank 0: the loop ----------------------------------------------------------------------------


def sample_of(rollout: async_loop.Rollout, advantage: float) -> Sample:
    return Sample(
        tokens=rollout.tokens.tolist(),
        prompt_length=rollout.prompt_length,
        logprobs=rollout.logprobs.tolist(),
        advantage=advantage,
        routes=rollout.attachments["routes"],
    )


def samples_of(groups) -> list[Sample]:
    rewards = torch.tensor([[rollout.reward for rollout in group.rollouts] for group in groups])
    advantages = losses.advantages.group_advantages(rewards.float()).flatten().tolist()
    rollouts = itertools.chain.from_iterable(group.rollouts for group in groups)
    return [sample_of(r, advantage) for r, advantage in zip(rollouts, advantages, strict=True)]


async def probe(trainer: Trainer, rollouts, texts: list[str], version: int) -> tuple:
    """Engine and trainer at the same version, on fresh rollouts of held-out prompts."""
    fresh = await rollouts.each(texts, version=version)
    samples = [sample_of(rollout, 0.0) for rollout in fresh]
    return version, *await asyncio.to_thread(on_all_ranks, trainer, "mismatch", samples)


async def drive(trainer: Trainer, checkpoint: Path, options: argparse.Namespace) -> None:
    """Rank 0: warm start, start the engine, run the loop, measure."""
    # Here, for the other ranks need no vLLM.
    import vllm
    from async_grpo.report import record_of, report
    from async_grpo.rollouts import Rollouts, engine_arguments, router_shape

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
    )
    history, probes, receipts, sync_seconds = [], [], [], []
    async with await VllmEngine.start(arguments, timeout_s=TIMEOUT_S) as engine:
        rollouts = Rollouts(engine, router_shape(config))
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
            return on_all_ranks(trainer, "train", samples_of(groups))

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
                    on_stale="wait",  # A hard bound; answers are of one length, nobody is slow.
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
        "fp8": options.fp8,
        "loss": options.loss,
        "loop_seconds": loop_seconds,
        "seconds": time.monotonic() - start,
    }
    report(summary, history, probes, options.out)


def trainer_device() -> torch.device:
    """A GPU of this rank's own behind the engine's first, where every rank finds one."""
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
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="FP8 attention projections and experts in the trainer; the engine gets their rounded "
        "values in bfloat16, for vLLM 0.32 cannot run FP8 weights on a CPU",
    )
    options = parser.parse_args()
    # torchrun ends the other ranks with SIGTERM: leave as after an error, cleaning up on the way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    disable_progress_bar()
    torch.set_num_threads(1)
    device = trainer_device()
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=2 * TIMEOUT_S))
    folder = tempfile.TemporaryDirectory(prefix="primeblocks-")
    checkpoint = Path(folder.name) / "checkpoint"
    checkpoint_on_all(checkpoint, partial(tiny_models.save, "qwen3_moe", seed=SEED, **MODEL))
    transport = transport_between_ranks()
    trainer = Trainer(checkpoint, device, transport, use_fp8=options.fp8, loss=options.loss)
    if trainer.rank == 0:
        asyncio.run(drive(trainer, checkpoint, options))
    else:
        follow(trainer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
