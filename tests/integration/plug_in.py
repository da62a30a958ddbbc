"""What the tests of examples/plug_in share."""

import importlib
from pathlib import Path

import torch

from primeblocks import weightsync
from tests.deadlines import HANG_S

__all__ = ["FOLDER", "example", "naive_losses", "plain_loss", "received"]

FOLDER = Path(__file__).parents[2] / "examples" / "plug_in"


def example(monkeypatch, name):
    """Import an example as Python does when it runs as a script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def received(name, version):
    """Return the weights that a reader gets."""
    held = {}
    plan, memory = weightsync.find(name, timeout_s=HANG_S)

    def load(tensors):
        held.update((name, tensor.clone()) for name, tensor in tensors)

    with memory, weightsync.Subscriber(plan, load, memory) as reader:
        reader.receive(version, timeout_s=HANG_S)
    return held


def as_sent(name, tensor):
    """Return a tensor as `announce(dtype=torch.bfloat16)` sends it."""
    is_router = name.endswith("mlp.gate.weight")
    return tensor.detach().to(torch.float32 if is_router else torch.bfloat16)


def plain_loss(logits, batch):
    """The loss of the examples in its plain form, from the logits of all tokens but the last."""
    logprobs = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    engine, advantages, mask = (
        batch[name][:, 1:] for name in ("engine_logprobs", "advantages", "mask")
    )
    old = logprobs.detach()
    weights = (old - engine).exp().clamp(max=2)
    return -((logprobs - old).exp() * weights * advantages)[mask].mean()


def naive_losses(model, batch, *, steps, lr):
    """Train with the plain loss, and return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    found = []
    for _ in range(steps):
        loss = plain_loss(model(batch["input_ids"][:, :-1]).logits, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
