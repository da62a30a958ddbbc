"""Plug a loss and a publisher into a plain PyTorch loop.

    python examples/plug_in/plain_pytorch.py

Log-probabilities are computed without a matrix of logits. The loss corrects for the difference
between engine and trainer. The weights are published after every step.
"""

import os

import tiny
import torch
from torch import Tensor, nn

from primeblocks import losses, weightsync

STEPS, LR, TIMEOUT_S = 5, 0.5, 60.0
NAME = f"plain-pytorch-{os.getpid()}"


# glue
def policy_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    keep = batch["mask"][:, 1:]
    hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1][keep]
    ids, engine = batch["input_ids"][:, 1:][keep], batch["engine_logprobs"][:, 1:][keep]
    logprobs = losses.logprobs.token_logprobs(hidden, model.lm_head.weight, ids)
    old, mask = logprobs.detach(), torch.ones_like(engine, dtype=torch.bool)
    weights = losses.corrections.importance_weights(old, engine, mask=mask).weights
    advantages = batch["advantages"][:, 1:][keep]
    loss = losses.grpo_loss(logprobs, old, advantages, mask=mask, weights=weights)
    return losses.normalisation.divide(loss, by="tokens")


def open_publisher(model: nn.Module, name: str) -> weightsync.Publisher:
    plan, transport = weightsync.announce(name, model, dtype=torch.bfloat16)
    return weightsync.Publisher(plan, model, transport, full_every=4)


# end of glue


def train(model: nn.Module, batch: dict[str, Tensor], *, name: str = NAME, steps: int = STEPS):
    """Train on one batch. After each step, publish the weights and yield the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with open_publisher(model, name) as publisher:  # glue
        for step in range(1, steps + 1):
            loss = policy_loss(model, batch)  # glue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            publisher.publish(step, timeout_s=TIMEOUT_S)  # glue
            yield loss.item()


def main() -> None:
    for step, loss in enumerate(train(tiny.model(), tiny.rollouts()), start=1):
        print(f"version {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
