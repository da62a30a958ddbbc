"""Run a trainer and engines as separate processes that exchange weights and rollouts.

    python examples/two_processes.py trainer /tmp/spelling &
    python examples/two_processes.py engine /tmp/spelling

The trainer sends weights through a folder, and the engines send rollouts over ZeroMQ. The policy
learns to spell six words. You can start any number of engines, at any time. You can also kill an
engine at any time. If you kill an engine, groups that have not reached the trainer's buffer are
lost. Each run needs a new folder, on a disk that all processes share. A run takes a few seconds on
a CPU.
"""

import argparse
import asyncio
import uuid

import torch
from torch import Tensor, nn

from primeblocks import losses, weightsync
from primeblocks.async_loop import Group, Rollout, RolloutBuffer, StalenessPolicy, staleness
from primeblocks.async_loop.adapters.zmq import RolloutReceiver, RolloutSender
from primeblocks.errors import DeadlineError
from primeblocks.weightsync.transports import FileTransport

STEPS, BATCH, GROUP, LR = 60, 8, 4, 2.0
WORDS, LETTERS, LENGTH = 6, 10, 12
MAX_OFF_POLICY_STEPS = 2
TIMEOUT_S, PUT_S = 120.0, 5.0

TARGET = torch.randint(LETTERS, (WORDS, LENGTH), generator=torch.Generator().manual_seed(0))


class Speller(nn.Module):
    """A policy with one logit for each word, position and letter."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(WORDS, LENGTH, LETTERS))

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of letters: [rollouts, 1 + LENGTH] -> [rollouts, LENGTH]."""
        of_letters = self.logits[tokens[:, 0]].log_softmax(-1)
        return of_letters.gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(model: Speller, version: int) -> Group:
    word = int(torch.randint(WORDS, ()))
    letters = torch.distributions.Categorical(logits=model.logits[word]).sample((GROUP,))
    tokens = torch.cat([torch.full((GROUP, 1), word), letters], dim=1)
    rollouts = tuple(
        Rollout(
            tokens=row,
            prompt_length=1,
            logprobs=logprobs,
            versions=[version] * LENGTH,
            finish_reason="length",
            reward=(row[1:] == TARGET[word]).float().mean().item(),
        )
        for row, logprobs in zip(tokens, model.logprobs(tokens), strict=True)
    )
    ordinal = uuid.uuid4().int >> 65  # Unique over all engines.
    return Group(f"spell word {word}", rollouts, version, ordinal=ordinal)


def loss_of(model: Speller, groups: tuple[Group, ...]) -> Tensor:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.tensor([rollout.reward for rollout in rollouts]).view(-1, GROUP)
    advantages = losses.advantages.group_advantages(rewards).view(-1, 1)
    logprobs = model.logprobs(torch.stack([torch.tensor(r.tokens) for r in rollouts]))
    engine = torch.stack([torch.tensor(r.logprobs) for r in rollouts]).float()
    mask = torch.ones_like(engine, dtype=torch.bool)
    loss = losses.aipo_loss(logprobs, engine, advantages.expand_as(engine), mask=mask)
    return losses.normalisation.divide(loss, by="tokens") * WORDS * LENGTH


def learn(model: Speller, optimizer: torch.optim.Optimizer, groups: tuple[Group, ...]) -> None:
    optimizer.zero_grad()
    loss_of(model, groups).backward()
    optimizer.step()


async def train(folder: str, address: str) -> None:
    model = Speller()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    policy = StalenessPolicy(MAX_OFF_POLICY_STEPS, "drop", "truncated importance sampling")
    buffer = RolloutBuffer(capacity=BATCH, staleness=policy)
    transport = FileTransport(folder, owner=True)
    plan, _ = weightsync.announce(transport, model)
    trained: set[int] = set()
    with transport, weightsync.Publisher(plan, model, transport) as publisher:
        publisher.publish(0, timeout_s=TIMEOUT_S)
        async with RolloutReceiver(buffer, address) as receiver:
            for version in range(STEPS):
                groups = await buffer.take(
                    BATCH, version=version, timeout_s=TIMEOUT_S, on_drop=receiver.settle
                )
                # In threads, because the receiver answers the engines in the event loop.
                await asyncio.to_thread(learn, model, optimizer, groups)
                await asyncio.to_thread(publisher.publish, version + 1, timeout_s=TIMEOUT_S)
                receiver.settle(*groups)  # The engines delete their copies.
                trained |= {group.ordinal for group in groups}
                rewards = [rollout.reward for group in groups for rollout in group.rollouts]
                lag = max(staleness(group, version=version) for group in groups)
                mean = sum(rewards) / len(rewards)
                print(f"step {version + 1}: mean reward {mean:.2f}, staleness {lag}", flush=True)
    assert len(trained) == STEPS * BATCH, "a group was trained on twice"


async def generate(folder: str, address: str) -> None:
    model = Speller()
    transport = FileTransport(folder)
    plan, _ = weightsync.find(transport, timeout_s=TIMEOUT_S)
    load = weightsync.load_into(model, plan)
    with transport, weightsync.Subscriber(plan, load, transport) as subscriber:
        version, refused = subscriber.receive(timeout_s=TIMEOUT_S).version, 0
        async with RolloutSender(address, retry_s=0.1) as sender:
            while version < STEPS:
                try:
                    await sender.put(sample(model, version), timeout_s=PUT_S)
                    refused = 0
                except DeadlineError:  # The buffer is full. Sample from newer weights instead.
                    refused += 1
                    if refused * PUT_S > TIMEOUT_S:  # The trainer has died.
                        raise
                # After a restart, the trainer first has no version, and then an older one.
                markers = transport.markers()
                if markers and markers[-1].version != version:
                    version = subscriber.receive(timeout_s=TIMEOUT_S).version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["trainer", "engine"])
    parser.add_argument("folder", help="for the weights, new in each run")
    parser.add_argument("--address", default="tcp://127.0.0.1:5555", help="of the trainer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    side = train if args.side == "trainer" else generate
    asyncio.run(side(args.folder, args.address))


if __name__ == "__main__":
    main()
