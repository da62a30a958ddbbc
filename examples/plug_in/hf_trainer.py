"""Plug a loss and a publisher into Hugging Face's Trainer.

    python examples/plug_in/hf_trainer.py

The Trainer counts the labels in all micro-batches and ranks of a step, and the loss is divided by
the number of labels. A callback publishes the weights of each step.
"""

import os
import tempfile

import tiny
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from primeblocks import losses, weightsync

STEPS, LR, ROLLOUTS, TIMEOUT_S = 5, 0.5, 8, 60.0
NAME = f"hf-trainer-{os.environ.get('MASTER_PORT', os.getpid())}"  # one name on all ranks


# glue
class PolicyTrainer(Trainer):
    loss_is_scaled_for_ga = True  # Over the micro-batches of a step.

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(inputs["input_ids"], output_hidden_states=True, logits_to_keep=1)
        keep = inputs["labels"][:, 1:] != -100
        hidden, head = out.hidden_states[-1][:, :-1][keep], self.accelerator.unwrap_model(model)
        ids, engine, advantages = (
            inputs[name][:, 1:][keep] for name in ("labels", "engine_logprobs", "advantages")
        )
        logprobs = losses.logprobs.token_logprobs(hidden, head.lm_head.weight, ids)
        old, mask = logprobs.detach(), torch.ones_like(engine, dtype=torch.bool)
        weights = losses.corrections.importance_weights(old, engine, mask=mask).weights
        loss = losses.grpo_loss(logprobs, old, advantages, mask=mask, weights=weights)
        loss = losses.normalisation.divide(loss, by=int(num_items_in_batch))
        loss *= self.accelerator.num_processes  # DDP divides by the number of ranks.
        return (loss, out) if return_outputs else loss


class Publish(TrainerCallback):
    def on_train_begin(self, args, state, control, model, **_):
        plan, transport = weightsync.announce(NAME, model, dtype=torch.bfloat16)
        self.publisher = weightsync.Publisher(plan, model, transport, full_every=4)

    def on_step_end(self, args, state, control, **_):
        self.publisher.publish(state.global_step, timeout_s=TIMEOUT_S)


# end of glue


def build(folder: str, *, micro_batches: int = 1, steps: int = STEPS) -> PolicyTrainer:
    """Return a trainer that trains on all rollouts in every step."""
    batch = tiny.rollouts(ROLLOUTS)
    batch["labels"] = batch["input_ids"].masked_fill(~batch.pop("mask"), -100)
    rows = [{name: values[row] for name, values in batch.items()} for row in range(ROLLOUTS)]
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=LR,
        per_device_train_batch_size=ROLLOUTS // micro_batches,
        gradient_accumulation_steps=micro_batches,
        remove_unused_columns=False,  # The loss needs all columns.
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = PolicyTrainer(tiny.model(), settings, train_dataset=rows)
    trainer.add_callback(Publish())
    return trainer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        build(folder).train()


if __name__ == "__main__":
    main()
