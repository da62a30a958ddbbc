"""Rollouts made by several processes, one of which is killed, and trained on in another.

    python examples/rollouts_from_processes.py

Worker processes sample completions from the newest weights and send them, group by group, to the
buffer of this process over ZeroMQ. This process takes batches, trains, writes new weights, and
settles the groups of the step. A full buffer makes the workers wait, so that no group is much older
than the policy. In the middle one worker gets a SIGKILL, and another worker goes on in its place.
In the end every group was trained on once, except the one that the dead worker had not put yet.
Seconds on a CPU.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from primeblocks.async_loop import Group, Rollout, RolloutBuffer, StalenessPolicy, staleness
from primeblocks.async_loop.adapters.zmq import RolloutReceiver, RolloutSender
from primeblocks.losses import aipo_loss
from primeblocks.losses.advantages import group_advantages

WORKERS, STEPS, BATCH, GROUP = 3, 60, 8, 4
GROUPS = STEPS * BATCH + 1  # One may be lost.
WORDS, LETTERS, LENGTH = 6, 10, 12  # A prompt names one of the words, which has 12 letters.
MAX_OFF_POLICY_STEPS = 2
KILL_AT = STEPS // 2
GROUP_S = 0.005  # What the engine takes for a group.
LR, SEED = 2.0, 0

TARGET = np.random.default_rng(SEED).integers(LETTERS, size=(WORDS, LENGTH))


def generate(draw: np.random.Generator, ordinal: int, weights: Path) -> Group:
    """Sample a group from the newest weights."""
    with np.load(weights) as newest:
        logprobs, version = newest["logprobs"], int(newest["version"])
    word = ordinal % WORDS
    rollouts = []
    for _ in range(GROUP):
        # The largest of noisy values is a sample: Gumbel's trick.
        completion = (logprobs[word] + draw.gumbel(size=(LENGTH, LETTERS))).argmax(-1)
        rollout = Rollout(
            tokens=np.concatenate([[word], completion]),
            prompt_length=1,
            logprobs=logprobs[word, np.arange(LENGTH), completion].astype(np.float64),
            versions=np.full(LENGTH, version),
            finish_reason="length",
            reward=float((completion == TARGET[word]).mean()),
        )
        rollouts.append(rollout)
    time.sleep(draw.exponential(GROUP_S))
    return Group(f"spell word {word}", tuple(rollouts), version, ordinal=ordinal)


async def work(address: str, weights: Path, ordinals: range) -> None:
    """Make groups until there are no more prompts; say which was begun, and which is put."""
    draw = np.random.default_rng(os.getpid())
    async with RolloutSender(address, retry_s=0.1) as sender:
        for ordinal in ordinals:
            print("begun", ordinal, flush=True)
            await sender.put(generate(draw, ordinal, weights), timeout_s=120)
            print("put", ordinal, flush=True)
        await sender.settled(timeout_s=120)


class Worker:
    """A process that makes the groups of some ordinals."""

    def __init__(self, address: str, weights: Path, ordinals: range) -> None:
        self.ordinals = ordinals
        numbers = map(str, (ordinals.start, ordinals.stop, ordinals.step))
        command = [sys.executable, __file__, "--work", address, str(weights), *numbers]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def kill(self) -> tuple[set[int], range]:
        """Send SIGKILL; return what it had begun and not said to be put, and what it had left."""
        self._process.kill()
        said = [line.split() for line in self._process.communicate()[0].splitlines()]
        begun = [int(ordinal) for what, ordinal in said if what == "begun"]
        put = {int(ordinal) for what, ordinal in said if what == "put"}
        return {*begun} - put, self.ordinals[len(begun) :]

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        self._process.communicate(timeout=120)
        assert self._process.returncode == 0


class Trainer:
    """Weights, and the file from which workers read them."""

    def __init__(self, weights: Path) -> None:
        self.weights = weights
        self.logits = torch.nn.Parameter(torch.zeros(WORDS, LENGTH, LETTERS))
        self.optimizer = torch.optim.SGD([self.logits], lr=LR)
        self.publish(0)

    def publish(self, version: int) -> None:
        """Replace the file: a worker reads old weights or new ones, never half of each."""
        logprobs = self.logits.detach().log_softmax(-1).numpy()
        new = self.weights.with_suffix(".new.npz")
        np.savez(new, logprobs=logprobs, version=version)
        new.rename(self.weights)

    def train(self, groups: tuple[Group, ...]) -> float:
        """Make one step; return the mean reward of its batch."""
        rewards = torch.tensor([[r.reward for r in group.rollouts] for group in groups])
        advantages = group_advantages(rewards).flatten()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        tokens = torch.tensor(np.stack([rollout.tokens for rollout in rollouts]))
        logprobs = self.logits.log_softmax(-1)[tokens[:, 0]]
        logprobs = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
        sampled = torch.tensor(np.stack([rollout.logprobs for rollout in rollouts])).float()
        loss = aipo_loss(
            logprobs,
            sampled,
            advantages[:, None].expand_as(logprobs),
            mask=torch.ones_like(logprobs, dtype=torch.bool),
        )
        self.optimizer.zero_grad()
        (loss.sum / loss.tokens * LENGTH * WORDS).backward()
        self.optimizer.step()
        return float(rewards.mean())


async def train(weights: Path) -> None:
    # "pace" keeps the group of a slow worker, which may exceed the bound.
    policy = StalenessPolicy(MAX_OFF_POLICY_STEPS, "pace", "truncated importance sampling")
    trainer = Trainer(weights)
    trained: list[int] = []
    lags: list[int] = []
    rewards: list[float] = []
    # With the groups that workers have in hand: so many that none becomes older than the bound by
    # waiting here.
    buffer = RolloutBuffer(capacity=MAX_OFF_POLICY_STEPS * BATCH - WORKERS, staleness=policy)
    async with RolloutReceiver(buffer, "tcp://127.0.0.1:0") as receiver:
        every = [range(i, GROUPS, WORKERS) for i in range(WORKERS)]
        workers = [Worker(receiver.address, weights, each) for each in every]
        for version in range(STEPS):
            groups = await buffer.take(BATCH, version=version, timeout_s=120)
            rewards.append(trainer.train(groups))
            trainer.publish(version + 1)
            receiver.settle(*groups)
            trained += [group.ordinal for group in groups]
            lags += [staleness(group, version=version) for group in groups]
            if version == KILL_AT:
                unfinished, left = await asyncio.to_thread(workers[0].kill)
                print(f"killed a worker at step {version}; it had begun and not put {unfinished}")
                workers[0] = Worker(receiver.address, weights, left)
            if version % 10 == 9:
                mean, lag = sum(rewards[-10:]) / 10, sum(lags) / len(lags)
                reward = f"mean reward {mean:.2f}"
                print(f"step {version + 1}: {reward}, lag {lag:.2f}, at most {max(lags)}")
        while not all(worker.has_ended() for worker in workers):
            if len(buffer):
                rest = await buffer.take(len(buffer), version=STEPS, timeout_s=120)
                receiver.settle(*rest)
                trained += [group.ordinal for group in rest]
            await asyncio.sleep(0.01)
        for worker in workers:
            worker.wait()
    lost = {*range(GROUPS)} - {*trained}
    assert len(trained) == len({*trained}), "a group was taken twice"
    assert lost <= unfinished, f"{lost} were lost"
    assert len(unfinished) <= 1, "a worker makes one group at a time"
    print(f"{len(trained)} of {GROUPS} groups taken, each once; lost: {len(lost)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=5, help="be a worker: address, weights, range of ordinals")
    if (asked := parser.parse_args().work) is not None:
        asyncio.run(work(asked[0], Path(asked[1]), range(*map(int, asked[2:]))))
        return
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(train(Path(folder, "weights.npz")))


if __name__ == "__main__":
    main()
