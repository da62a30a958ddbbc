"""Train two LoRA policies for opposite tasks at once, with one vLLM engine and one base model.

    python examples/two_adapters.py
    python examples/two_adapters.py --fault train
    python examples/two_adapters.py --fault generate

The base model writes a random walk along the alphabet, one letter up or one letter down per step.
The policy "up" gets a reward for steps up, and the policy "down" for steps down. Each policy has
its own loop, with its own prompts, buffer, staleness bound, optimizer and versions. The engine
loads each version of an adapter under its own name ("up@7"), in addition to older versions.
Requests of both policies continue during a load. A request keeps the adapter with which it began,
so all tokens of a request have one version. With `--fault`, the policy "down" fails at one step and
stops, while the policy "up" continues to its end. After the failure, the script repairs the policy
"down", which continues from its newest version in the engine.

For your own experiment, change the constants in this file. The trainer computes on the CPU.
"""

import argparse
import asyncio
import contextlib
import copy
import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

# Settings for vLLM on a CPU, before the import of vLLM: no model hub, no compilation, one thread.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

import peft
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from primeblocks import async_loop, losses, weightsync
from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args
from primeblocks.errors import ClosedError
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters.vllm import lora
from primeblocks.weightsync.engines import AdapterSpec, adapter_parameters

# --- the task: a walk along the circle of letters ---
TENANTS = {"up": +1, "down": -1}
PAD, BOS, FIRST_LETTER, LETTERS, WALK = 0, 1, 3, 26, 12
# --- the model: LoRA on mixtures of experts needs a GPU in vLLM 0.32, so this one is dense ---
MODEL = {"num_layers": 2, "hidden": 64, "vocab": 32}
SEED = 0
# --- warm start of the base, on random walks ---
WARM_STEPS, WARM_BATCH, WARM_LR = 150, 64, 3e-3
# --- reinforcement learning ---
RANK, ALPHA, LR = 8, 16, 3e-3
STEPS, PROMPTS, GROUP = 30, 8, 8
MAX_OFF_POLICY_STEPS = 2
FAULT_AT = 10  # the version of "down" at which `train` or `generate` fails
TIMEOUT_S = 120.0
# Versions per tenant: versions with requests, the next version, and a version to be removed.
VERSIONS_HELD = MAX_OFF_POLICY_STEPS + 3


def letter(place: int) -> int:
    return FIRST_LETTER + place % LETTERS


def reward_of(tokens: Sequence[int], direction: int) -> float:
    """Return the share of a walk's steps that go in `direction`. `tokens` includes the prompt."""
    pairs = itertools.pairwise(tokens[1:])  # After BOS.
    right = sum(b >= FIRST_LETTER and b == letter(a - FIRST_LETTER + direction) for a, b in pairs)
    return right / WALK


def mean_reward(walks: Sequence[Sequence[int]], direction: int) -> float:
    return statistics.mean(reward_of(walk, direction) for walk in walks)


# --- the trainer ---------------------------------------------------------------------------------


class Trainer:
    """A base model with one LoRA adapter per tenant (policy). The tenants train in turn."""

    def __init__(self, base: nn.Module, names: Sequence[str]) -> None:
        first, *others = names
        self.model = peft.get_peft_model(base, self._config(), adapter_name=first)
        for other in others:
            self.model.add_adapter(other, self._config())
        self._turn = threading.Lock()

    @staticmethod
    def _config() -> peft.LoraConfig:
        return peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")

    @contextlib.contextmanager
    def adapted(self, name: str) -> Iterator[nn.Module]:
        """Yield the model with one active adapter. Only the active adapter gets gradients."""
        # The active adapter is a state of the modules. A tenant that hangs here blocks all tenants.
        with self._turn:
            self.model.set_adapter(name)
            yield self.model


def warm_start(base: nn.Module) -> float:
    """Train the base model on random walks. Return the last loss, in nats per token."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(base.parameters(), lr=WARM_LR)
    loss = torch.zeros(())
    for _ in range(WARM_STEPS):
        steps = torch.randint(2, (WARM_BATCH, WALK), generator=generator) * 2 - 1
        start = torch.randint(LETTERS, (WARM_BATCH, 1), generator=generator)
        walk = FIRST_LETTER + torch.cat([start, start + steps.cumsum(1)], 1) % LETTERS
        tokens = torch.cat([torch.full_like(start, BOS), walk], 1)
        loss = -logprobs_of(base, tokens)[:, 1:].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def logprobs_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token after the first token, `[batch, tokens - 1]`."""
    # Padding is on the right, where causal attention cannot see it.
    logits = model(input_ids=tokens, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def tensors_of(rollouts: Sequence[async_loop.Rollout]) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded tokens, a mask of sampled `tokens[:, 1:]`, and log-probabilities."""
    rows = [torch.from_numpy(rollout.tokens.copy()) for rollout in rollouts]
    tokens = pad_sequence(rows, batch_first=True, padding_value=PAD)
    position = torch.arange(1, tokens.shape[1])
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    prompts = torch.tensor([rollout.prompt_length for rollout in rollouts])[:, None]
    mask = (position >= prompts) & (position < lengths)
    sampled = torch.zeros(mask.shape)
    sampled[mask] = torch.cat([torch.from_numpy(r.logprobs.copy()) for r in rollouts]).float()
    return tokens, mask, sampled


# --- a tenant ------------------------------------------------------------------------------------


class Tenant:
    """A policy with an adapter, an optimizer, a loop, and versions in the engine.

    Args:
        fault: the method ("train" or "generate") that fails from version `FAULT_AT` on. If `fault`
            is empty, no method fails.
    """

    def __init__(self, name: str, trainer: Trainer, engine: VllmEngine, fault: str = "") -> None:
        self.name, self.direction, self.fault = name, TENANTS[name], fault
        self.trainer, self.engine = trainer, engine
        self.tensors = adapter_parameters(trainer.model, adapter=name)
        self.optimizer = torch.optim.AdamW(self.tensors.values(), lr=LR, weight_decay=0.0)
        manifest = weightsync.describe(self.tensors)
        self.plan = weightsync.plan_sync([manifest], manifest.whole(), bucket_bytes=1 << 20)
        self.transport = weightsync.SharedMemoryTransport(
            f"two-adapters-{os.getpid()}-{name}", owner=True
        )
        self.publisher = weightsync.Publisher(self.plan, self.tensors, self.transport)
        self.served: dict[int, Any] = {}  # vLLM's request for each version that the engine holds
        self.in_flight: Counter[int] = Counter()  # requests by version
        self.saved: dict[int, tuple] = {}  # weights and moments of all versions
        self.publishing: asyncio.Task[None] | None = None
        self.runs = 0
        self.history: list[async_loop.Step] = []
        self.update_s: list[float] = []

    @property
    def version(self) -> int:
        """The newest version of the tenant's adapter in the engine."""
        return max(self.served)

    async def attach(self) -> None:
        """Connect the engine to the publisher of this adapter, and publish version 0."""
        config = self.trainer.model.peft_config[self.name].to_dict()
        spec = AdapterSpec.from_peft(self.name, config)
        await lora.attach_lora(
            self.engine.llm,
            spec,
            self.plan,
            self.transport,
            keep=VERSIONS_HELD,
            timeout_s=TIMEOUT_S,
        )
        await self.publish(0)

    async def run(self, steps: int) -> None:
        """Train until version `steps`. If an error ends the loop earlier, raise the error."""
        if self.publishing is not None:
            await asyncio.wait({self.publishing})
        await asyncio.to_thread(self.restore)
        chance = random.Random(f"{self.name} {self.version}")
        loop = async_loop.AsyncLoop(
            prompts=([BOS, letter(chance.randrange(LETTERS))] for _ in itertools.count()),
            generate=self.generate,
            train=partial(self.train, self.runs),
            publish=self.publish,
            buffer=async_loop.RolloutBuffer(
                capacity=(MAX_OFF_POLICY_STEPS + 1) * PROMPTS,
                staleness=async_loop.StalenessPolicy(
                    MAX_OFF_POLICY_STEPS,
                    on_stale="wait",
                    correction="clipped ratio to the engine's log-probabilities",
                ),
            ),
            batch_size=PROMPTS,
            max_in_flight=2 * PROMPTS,
            retries=async_loop.scheduler.Retries(attempts=2, backoff_s=0.01, give_up_after=4),
            version=self.version,
            step_timeout_s=TIMEOUT_S,
        )
        with tqdm(total=steps, initial=self.version, desc=self.name) as bar:
            async with loop:
                async for step in loop.steps(steps - self.version):
                    self.history.append(step)
                    bar.set_postfix(step.postfix(), refresh=False)
                    bar.update()

    def restore(self) -> None:
        """Restore the weights and moments of the newest version in the engine.

        Python cannot end a thread, so a step of the failed run may still be running. `restore`
        undoes a step that ended after the failure. If a step of the failed run still waits for the
        model, the step raises `ClosedError`."""
        weights, moments = copy.deepcopy(self.saved[self.version])
        with self.trainer.adapted(self.name):
            self.runs += 1
            self.load(weights)
            self.optimizer.load_state_dict(moments)

    async def generate(self, prompt: list[int], *, version: int) -> list[async_loop.Rollout]:
        """Sample a group from the engine's newest version, which may be newer than `version`."""
        newest = self.version
        if self.fault == "generate" and newest >= FAULT_AT:
            raise ConnectionError(f"the judge of {self.name!r} does not answer")
        self.in_flight[newest] += 1
        try:
            answers = await self.ask(prompt, newest, n=GROUP)
        finally:
            self.in_flight[newest] -= 1
        return [
            answer.to_rollout(reward=reward_of([*prompt, *answer.token_ids], self.direction))
            for answer in answers
        ]

    async def ask(self, prompt: list[int], version: int, **options: Any) -> tuple:
        return await self.engine.generate(
            prompt,
            max_tokens=WALK,
            timeout_s=TIMEOUT_S,
            lora_request=self.served[version],
            adapter_version=version,
            # KV pages are shared only within one version of a tenant.
            cache_salt=f"{self.name}-{async_loop.cache_salt(version)}",
            **options,
        )

    def train(self, run: int, groups: Sequence[async_loop.Group], *, version: int) -> float:
        """Make one GRPO step on the tenant's adapter. Return the mean reward."""
        rewards = torch.tensor([[rollout.reward for rollout in g.rollouts] for g in groups])
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        tokens, mask, sampled = tensors_of(rollouts)
        advantages = losses.advantages.group_advantages(rewards).flatten()
        advantages = advantages[:, None].expand_as(mask)
        with self.trainer.adapted(self.name) as model:
            if run != self.runs:
                raise ClosedError(f"run {run} of {self.name!r} is over")
            logprobs = logprobs_of(model, tokens)
            loss = losses.grpo_loss(logprobs, sampled, advantages, mask=mask)
            if self.fault == "train" and version >= FAULT_AT:
                raise FloatingPointError(f"the loss of {self.name!r} is not finite")
            self.optimizer.zero_grad()  # First, because a failed step may have left gradients.
            (loss.sum / loss.tokens).backward()
            nn.utils.clip_grad_norm_(self.tensors.values(), 1.0)
            self.optimizer.step()
        return rewards.mean().item()

    async def publish(self, version: int) -> None:
        """Load a version into the engine, and remove older versions that no request uses."""
        self.publishing = asyncio.ensure_future(self._publish(version))
        # A publish that has begun is completed, even if another failure ends the run meanwhile.
        await asyncio.shield(self.publishing)

    async def _publish(self, version: int) -> None:
        began = time.monotonic()
        self.saved[version] = copy.deepcopy((self.tensors, self.optimizer.state_dict()))
        receipt = await asyncio.to_thread(self.publisher.publish, version, timeout_s=TIMEOUT_S)
        self.served[version] = await lora.update_lora(
            self.engine.llm, self.name, receipt, timeout_s=TIMEOUT_S
        )
        self.update_s.append(time.monotonic() - began)
        for old in [v for v in self.served if v < version and not self.in_flight[v]]:
            await lora.remove_lora(self.engine.llm, self.served.pop(old), timeout_s=TIMEOUT_S)

    def close(self) -> None:
        self.publisher.close()
        self.transport.close()

    # --- what is measured ---

    @cached_property
    def rollouts(self) -> list[async_loop.Rollout]:
        """All rollouts on which the adapter was trained."""
        return [r for step in self.history for group in step.groups for r in group.rollouts]

    @torch.no_grad()
    def audit(self, *, shift: int = 0) -> float:
        """Return the largest difference between log-probabilities of engine and adapter.

        A rollout that version `v` sampled is compared with the adapter of version `v - shift`.
        """
        worst, now = 0.0, {name: tensor.clone() for name, tensor in self.tensors.items()}
        for version, (weights, _) in self.saved.items():
            mine = [r for r in self.rollouts if set(r.versions.tolist()) == {version + shift}]
            if not mine:
                continue
            tokens, mask, sampled = tensors_of(mine)
            with self.trainer.adapted(self.name) as model:
                self.load(weights)
                found = logprobs_of(model, tokens)
            worst = max(worst, (found - sampled)[mask].abs().max().item())
        self.load(now)
        return worst

    def is_as_published(self) -> bool:
        """Return whether the adapter has the exact bits of its last published version."""
        published, _ = self.saved[self.version]
        return all(torch.equal(tensor, published[name]) for name, tensor in self.tensors.items())

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    async def walks(self, version: int) -> list[list[int]]:
        """Sample one walk per start letter, with a version of the adapter."""
        prompts = [[BOS, letter(place)] for place in range(LETTERS)]
        answers = await asyncio.gather(*(self.ask(p, version, seed=SEED) for p in prompts))
        return [[*p, *answer.token_ids] for p, (answer,) in zip(prompts, answers, strict=True)]

    async def summary(self, error: BaseException | None) -> dict[str, Any]:
        walks = await self.walks(self.version)
        versions = [r.versions.tolist() for r in self.rollouts]
        return {
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "steps": len(self.history),
            "final_version": self.version,
            "held": sorted(self.served),
            "versions_trained": sorted(set().union(*versions)),
            "rollouts_of_one_version": sum(len(set(row)) == 1 for row in versions),
            "rollouts": len(versions),
            "max_staleness_seen": max(max(step.staleness) for step in self.history),
            "rewards": [round(step.metrics, 4) for step in self.history],
            "after": {name: mean_reward(walks, way) for name, way in TENANTS.items()},
            "logprob_error": await asyncio.to_thread(self.audit),
            "logprob_error_one_off": await asyncio.to_thread(self.audit, shift=1),
            "update_seconds_median": statistics.median(self.update_s),
        }


# --- the run -------------------------------------------------------------------------------------


def engine_arguments(checkpoint: Path) -> dict[str, Any]:
    arguments = base_engine_args(
        checkpoint,
        seed=0,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=len(TENANTS) * 2 * PROMPTS * GROUP,
        kv_bytes=64 << 20,
        max_lora_rank=RANK,
        max_loras=len(TENANTS) * (MAX_OFF_POLICY_STEPS + 2),  # in one batch. Other adapters wait
    )
    return arguments | lora.lora_engine_args()


async def train_all(tenants: Sequence[Tenant], steps: int) -> dict[str, BaseException | None]:
    """Run all tenants, and return the errors. An error of one tenant stops only this tenant."""

    async def end_of(tenant: Tenant) -> BaseException | None:
        try:
            await tenant.run(steps)
        except Exception as error:  # An error stops only this tenant.
            versions = ", ".join(f"{each.name}@{each.version}" for each in tenants)
            print(f"{tenant.name!r} has failed ({versions}): {error!r}", flush=True)
            return error
        print(f"{tenant.name!r} has made its {steps} steps", flush=True)
        return None

    ends = await asyncio.gather(*map(end_of, tenants))
    return {tenant.name: end for tenant, end in zip(tenants, ends, strict=True)}


async def drive(
    tenants: Sequence[Tenant], engine: VllmEngine, options: argparse.Namespace
) -> dict[str, Any]:
    """Train all tenants, repair failed tenants, and return the measurements."""
    for tenant in tenants:
        await tenant.attach()
    began = time.monotonic()
    errors = await train_all(tenants, options.steps)
    loop_seconds = time.monotonic() - began
    failed = [tenant for tenant in tenants if errors[tenant.name] is not None]
    versions = {tenant.name: tenant.version for tenant in tenants}
    for tenant in failed:
        tenant.fault = ""
    if failed:
        await train_all(failed, options.steps)
    untouched = all(tenant.is_as_published() for tenant in tenants)
    prompts = [[BOS, letter(place)] for place in range(LETTERS)]
    answers = [
        await engine.generate(p, max_tokens=WALK, timeout_s=TIMEOUT_S, seed=SEED) for p in prompts
    ]
    walks = [[*p, *answer.token_ids] for p, (answer,) in zip(prompts, answers, strict=True)]
    return {
        "base": {name: mean_reward(walks, direction) for name, direction in TENANTS.items()},
        "tenants": {t.name: await t.summary(errors[t.name]) for t in tenants},
        "versions_before_repair": versions,
        "untouched": untouched,
        "loop_seconds": loop_seconds,
    }


def report(summary: dict[str, Any]) -> None:
    """Print the rewards of each tenant, and the differences between engine and trainer."""
    columns = ["", "steps", "lag", "first", "last", *(f"on {name}" for name in TENANTS)]
    columns += ["log p off by", "a version off", "update ms"]
    rows = []
    for name, told in summary["tenants"].items():
        rewards = [told["rewards"][0], told["rewards"][-1], *told["after"].values()]
        row = [name, str(told["steps"]), str(told["max_staleness_seen"])]
        row += [f"{reward:.3f}" for reward in rewards]
        row += [f"{told['logprob_error']:.1e}", f"{told['logprob_error_one_off']:.1e}"]
        rows.append([*row, f"{1000 * told['update_seconds_median']:.0f}"])
    base = [f"{reward:.3f}" for reward in summary["base"].values()]
    rows.append(["base", "", "", "", "", *base, "", "", ""])
    for row in [columns, *rows]:
        print("".join(f"{cell:>15}" if i > 6 else f"{cell:>9}" for i, cell in enumerate(row)))
    print(f"{summary['loop_seconds']:.1f} s in the loops, {summary['seconds']:.1f} s in all")


async def main(options: argparse.Namespace) -> None:
    start = time.monotonic()
    disable_progress_bar()
    base = tiny_models.build("qwen3", seed=SEED, dtype="float32", **MODEL)
    print(f"warm start: loss {warm_start(base):.3f} nats a token", flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        base.save_pretrained(folder)  # Before PEFT adds its modules.
        trainer = Trainer(base, list(TENANTS))
        async with await VllmEngine.start(
            engine_arguments(Path(folder)), timeout_s=5 * TIMEOUT_S
        ) as engine:
            faults = {"down": options.fault}
            tenants = [Tenant(name, trainer, engine, faults.get(name, "")) for name in TENANTS]
            for tenant in tenants:
                stack.callback(tenant.close)
            summary = await drive(tenants, engine, options)
    summary["seconds"] = time.monotonic() - start
    report(summary)
    if options.out is not None:
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--fault", choices=["train", "generate"], default="")
    parser.add_argument("--out", type=Path, help="folder for summary.json")
    asyncio.run(main(parser.parse_args()))
