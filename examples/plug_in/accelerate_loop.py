"""Plug a loss and a publisher into a loop of Hugging Face accelerate.

    accelerate launch examples/plug_in/accelerate_loop.py

`accelerator.backward` divides the loss by the number of micro-batches, and DDP divides the
gradients by the number of ranks. Our loss already divides by the tokens of the whole step, so
`train` multiplies the loss by both numbers.
"""

import os

import tiny
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from primeblocks import losses, weightsync

STEPS, MICRO_BATCHES, LR, TIMEOUT_S = 5, 2, 0.5, 60.0
ROLLOUTS = 8


# glue
def token_loss(model: nn.Module, head: Tensor, batch: dict[str, Tensor]) -> losses.TokenLoss:
    out = model(batch["input_ids"], output_hidden_states=True, logits_to_keep=1)
    keep = batch["mask"][:, 1:]
    hidden, ids = out.hidden_states[-1][:, :-1][keep], batch["input_ids"][:, 1:][keep]
    engine, advantages = (batch[x][:, 1:][keep] for x in ("engine_logprobs", "advantages"))
    logprobs = losses.logprobs.token_logprobs(hidden, head, ids)
    old, mask = logprobs.detach(), torch.ones_like(engine, dtype=torch.bool)
    weights = losses.corrections.importance_weights(old, engine, mask=mask).weights
    return losses.grpo_loss(logprobs, old, advantages, mask=mask, weights=weights)


# end of glue


def train(accelerator: Accelerator, *, name: str, steps: int = STEPS):
    """Train on one batch. After each step, publish the weights and yield the model and the loss."""
    model, parts = tiny.model(), MICRO_BATCHES * accelerator.num_processes
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    rollouts = tiny.rollouts(ROLLOUTS)
    rows = [{key: rollouts[key][row] for key in rollouts} for row in range(ROLLOUTS)]
    loader = DataLoader(rows, batch_size=ROLLOUTS // parts)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    head = accelerator.unwrap_model(model).lm_head.weight
    # glue
    plan, transport = weightsync.announce(name, model, dtype=torch.bfloat16)
    publisher = weightsync.Publisher(plan, model, transport, full_every=4)
    # end of glue
    for step in range(1, steps + 1):
        batches, total = list(loader), 0.0
        # glue
        tokens = sum(batch["mask"][:, 1:].sum() for batch in batches)
        tokens = int(accelerator.reduce(tokens, reduction="sum"))
        # end of glue
        for batch in batches:
            with accelerator.accumulate(model):
                # glue
                loss = losses.normalisation.divide(token_loss(model, head, batch), by=tokens)
                accelerator.backward(loss * parts)
                # end of glue
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item()
        publisher.publish(step, timeout_s=TIMEOUT_S)  # glue
        total = torch.tensor(total, device=accelerator.device)
        yield model, accelerator.reduce(total, reduction="sum").item()
    publisher.close()


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    name = f"accelerate-{os.environ.get('MASTER_PORT', os.getpid())}"  # one name on all ranks
    for step, (_, loss) in enumerate(train(accelerator, name=name), start=1):
        accelerator.print(f"version {step}: loss {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
