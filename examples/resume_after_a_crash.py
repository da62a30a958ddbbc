"""Compare a training run that is killed several times with a run that is never killed.

    python examples/resume_after_a_crash.py

A small policy learns to spell the word that a prompt names, in an asynchronous loop with a journal.
The script starts two runs as child processes. The first run is not disturbed, and the second run
gets SIGKILL at random moments. A killed run continues from its last saved weights, and repeats the
steps after the save. The run also continues its unfinished rollouts, and trains on groups that were
finished before the kill. The final weights contain the training on each prompt exactly once. After
each restart, the script prints how many groups and tokens the journal restored. At the end, the
script prints the tables of both journals. The script takes half a minute on a CPU.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from primeblocks.async_loop import (
    AsyncLoop,
    Group,
    Journal,
    Partial,
    Rollout,
    RolloutBuffer,
    StalenessPolicy,
)
from primeblocks.async_loop.ledger import Draft, Restored
from primeblocks.losses import aipo_loss
from primeblocks.losses.advantages import group_advantages

PROMPTS, BATCH, GROUP = 480, 8, 4
WORDS, LETTERS, LENGTH = 6, 10, 12  # A prompt names one of the words, which has 12 letters.
MAX_OFF_POLICY_STEPS, MAX_IN_FLIGHT = 2, 64
LR, SEED = 2.0, 0
TOKEN_S = 0.0005  # mean time in which the engine samples a token
SAVE_TOKENS = 3  # tokens between two saves of a rollout
SAVE_STEPS = 5  # steps between two saves of the weights
KILLS = 4

TARGET = torch.randint(LETTERS, (WORDS, LENGTH), generator=torch.Generator().manual_seed(SEED))


class Trainer:
    """Contains the weights, the optimizer, and the names of the trained prompts."""

    def __init__(self, folder: Path) -> None:
        self.file, self.version, self.trained = folder / "weights.pt", 0, []
        self.logits = torch.nn.Parameter(torch.zeros(WORDS, LENGTH, LETTERS))
        self.optimizer = torch.optim.SGD([self.logits], lr=LR)
        if self.file.exists():
            saved = torch.load(self.file)
            self.logits.data, self.version = saved["logits"], saved["version"]
            self.trained = saved["trained"]

    def train(self, groups: tuple[Group, ...], *, version: int) -> float:
        """Make one optimizer step. Return the mean reward of the batch."""
        rewards = torch.tensor([[r.reward for r in group.rollouts] for group in groups])
        advantages = group_advantages(rewards).flatten()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        words = torch.tensor([group.prompt["word"] for group in groups for _ in group.rollouts])
        completions = torch.tensor(np.stack([rollout.completion for rollout in rollouts]))
        logprobs = self.logits.log_softmax(-1)[words].gather(-1, completions[..., None])[..., 0]
        loss = aipo_loss(
            logprobs,
            torch.tensor(np.stack([rollout.logprobs for rollout in rollouts])).float(),
            advantages[:, None].expand_as(logprobs),
            mask=torch.tensor(np.stack([rollout.loss_mask for rollout in rollouts])),
        )
        self.optimizer.zero_grad()
        (loss.sum / loss.tokens * LENGTH * WORDS).backward()
        self.optimizer.step()
        self.trained += [group.prompt["name"] for group in groups]
        self.version = version + 1
        return float(rewards.mean())

    def save(self) -> None:
        """Save the weights completely or not at all."""
        new = self.file.with_suffix(".new")
        saved = {"logits": self.logits.data, "version": self.version, "trained": self.trained}
        torch.save(saved, new)
        new.rename(self.file)


class Engine:
    """Samples with the last published weights, one token at a time."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.publish(trainer.version)

    def publish(self, version: int) -> None:
        self._logprobs: Tensor = self._trainer.logits.detach().log_softmax(-1)
        self._version = version

    async def generate(self, prompt: dict, *, version: int, sample: int, draft: Draft) -> Rollout:
        """Sample one completion. If `draft` has saved tokens, continue these tokens."""
        so_far = draft.partials.get(sample)
        tokens = [] if so_far is None else so_far.completion.tolist()
        logprobs = [] if so_far is None else so_far.logprobs.tolist()
        versions = [] if so_far is None else so_far.versions.tolist()
        while len(tokens) < LENGTH:
            await asyncio.sleep(TOKEN_S * random.expovariate(1.0))
            choices = self._logprobs[prompt["word"], len(tokens)]
            tokens.append(int(torch.multinomial(choices.exp(), 1)))
            logprobs.append(float(choices[tokens[-1]]))
            versions.append(self._version)  # may change within a completion
            fields = {
                "tokens": np.array([prompt["word"], *tokens]),
                "prompt_length": 1,
                "logprobs": np.array(logprobs),
                "versions": np.array(versions),
            }
            if len(tokens) % SAVE_TOKENS == 0 and len(tokens) < LENGTH:
                draft.save(sample, Partial(**fields))
        right = np.array(tokens) == TARGET[prompt["word"]].numpy()
        return Rollout(**fields, finish_reason="length", reward=float(right.mean()))


async def run(folder: Path) -> None:
    """Train on all prompts, beginning with the state that the folder contains."""
    torch.manual_seed(SEED + os.getpid())  # Each process samples other tokens.
    trainer = Trainer(folder)
    engine = Engine(trainer)
    with Journal(folder / "journal") as journal:
        restored = journal.restore(trainer.version)  # Only to print it. The loop restores too.
        tell(came_back=came_back(restored, step=trainer.version), step=trainer.version)
        loop = AsyncLoop(
            # Prompts and order must not change: the loop skips as many as the journal has drawn.
            prompts=({"name": f"prompt {i}", "word": i % WORDS} for i in range(PROMPTS)),
            generate=engine.generate,
            train=trainer.train,
            publish=engine.publish,
            buffer=RolloutBuffer(
                capacity=(MAX_OFF_POLICY_STEPS + 1) * BATCH,
                staleness=StalenessPolicy(
                    MAX_OFF_POLICY_STEPS, correction="truncated importance sampling"
                ),
            ),
            batch_size=BATCH,
            max_in_flight=MAX_IN_FLIGHT,
            group_size=GROUP,
            ledger=journal,
            version=trainer.version,
        )
        async with loop:
            async for step in loop.steps(PROMPTS // BATCH):
                tell(step=step.version, reward=step.metrics)
                if step.version % SAVE_STEPS == 0 or step.version == PROMPTS // BATCH:
                    trainer.save()
                    journal.checkpointed(step.version)  # Groups up to this step are final.
        tell(trained=trainer.trained, ledger=journal.table())


def came_back(restored: Restored, *, step: int) -> dict[str, int]:
    """Return the numbers of prompts, groups and tokens that a journal restored."""
    kept = [item for _, _, partials in restored.again for item in partials.values()]
    return {
        "step": step,
        "drawn": restored.cursor,
        "finished": len(restored.finished),
        "in_flight": len(restored.again),
        "trajectories": len(kept),
        "tokens": sum(len(item.completion) for item in kept),
    }


def tell(**values: object) -> None:
    print(json.dumps(values), flush=True)


def live(folder: Path, bar: tqdm, *, kill_after: float | None) -> dict:
    """Run a child process to its end, or kill it `kill_after` steps after its first step."""
    told: dict = {}
    command = [sys.executable, __file__, "--run", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        first = None
        for line in child.stdout:
            told |= json.loads(line)
            bar.n, first = told["step"], told["step"] if first is None else first
            bar.set_postfix(reward=f"{told.get('reward', 0):.2f}")
            if kill_after is not None and told["step"] >= first + kill_after:
                child.kill()
                kill_after = None
    if child.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"a life ended with exit code {child.returncode}")
    return told | {"is_over": child.returncode == 0}


def lives(folder: Path, *, kills: int) -> dict:
    """Run until all prompts are trained on, and kill the run `kills` times."""
    folder.mkdir()
    chance = random.Random(SEED)
    with tqdm(total=PROMPTS // BATCH, desc=folder.name, leave=True) as bar:
        for life in range(kills + 1):
            kill_after = chance.randint(3, 12) if life < kills else None
            told = live(folder, bar, kill_after=kill_after)
            if life:
                back = told["came_back"]
                bar.write(
                    f"  killed; came back at step {back['step']}: of {back['drawn']} prompts drawn "
                    f"{back['finished']} groups finished, {back['in_flight']} prompts in flight "
                    f"with {back['tokens']} tokens in {back['trajectories']} trajectories"
                )
            if told["is_over"]:
                break
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="be a child that trains in this folder")
    folder = parser.parse_args().run
    if folder is not None:
        torch.set_num_threads(1)
        asyncio.run(run(folder))
        return
    with tempfile.TemporaryDirectory() as top:
        alone = lives(Path(top, "undisturbed"), kills=0)
        killed = lives(Path(top, "killed"), kills=KILLS)
    for name, told in (("undisturbed", alone), ("killed", killed)):
        print(f"\n{name}: reward of the last batch {told['reward']:.2f}\n{told['ledger']}")
    once = len(set(killed["trained"])) == len(killed["trained"])
    same = sorted(killed["trained"]) == sorted(alone["trained"])
    print(f"\nno prompt trained twice: {once}; the same prompts in both runs: {same}; ", end="")
    print(f"the same ledger: {alone['ledger'] == killed['ledger']}")


if __name__ == "__main__":
    main()
