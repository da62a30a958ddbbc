"""Plug a loss and a publisher into TRL 1.16's GRPOTrainer.

    python examples/plug_in/trl_grpo.py

TRL samples rollouts, and computes rewards and log-probabilities. This example uses the loss of
DAPO. You can use another loss of `primeblocks.losses` instead of the loss of DAPO.
`examples/trl_async_grpo.py` uses TRL's asynchronous trainer.
"""

import os
import tempfile

import tiny
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from primeblocks import losses, weightsync
from primeblocks.testing import tiny_models

STEPS, PROMPTS, GROUP, LR, TIMEOUT_S = 5, 4, 4, 3e-3, 60.0
NAME = f"trl-grpo-{os.environ.get('MASTER_PORT', os.getpid())}"  # one name on all ranks


# glue
class PolicyTrainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        logprobs, _, balance = self._get_per_token_logps_and_entropies(
            model, ids, seen, mask.shape[1], compute_aux_loss=self.aux_loss_enabled
        )
        old = inputs.get("old_per_token_logps", logprobs.detach())
        advantages = inputs["advantages"][:, None].expand_as(logprobs)
        ratio = inputs.get("importance_sampling_ratio", torch.ones(1)).to(old).expand_as(old)
        loss = losses.grpo_loss(logprobs, old, advantages, mask=mask, clip_high=0.28, weights=ratio)
        # TRL counts the tokens over all ranks and all steps that train on one generation.
        parts = self.current_gradient_accumulation_steps
        tokens = inputs["num_items_in_batch"] * parts / self.args.steps_per_generation
        value = loss.sum / tokens.clamp(min=1.0) * self.accelerator.num_processes
        return value + (self.router_aux_loss_coef * balance / parts if balance is not None else 0)


class Publish(TrainerCallback):
    def on_train_begin(self, args, state, control, model, **_):
        plan, transport = weightsync.announce(NAME, model, dtype=torch.bfloat16)
        self.publisher = weightsync.Publisher(plan, model, transport, full_every=4)

    def on_step_end(self, args, state, control, **_):
        self.publisher.publish(state.global_step, timeout_s=TIMEOUT_S)


# end of glue


def even(completion_ids: list[list[int]], **_) -> list[float]:
    """Return the share of even tokens in each completion."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def build(folder: str, *, kind=PolicyTrainer, steps: int = STEPS) -> GRPOTrainer:
    """Return a trainer that trains a tiny model on random prompts."""
    model = str(tiny_models.save("qwen3_moe", f"{folder}/model", dtype="float32", **tiny.SIZES))
    settings = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        learning_rate=LR,
        per_device_train_batch_size=PROMPTS * GROUP // 2,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        max_completion_length=tiny.ANSWER,
        loss_type="dapo",
        epsilon_high=0.28,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
    )
    prompts = [" ".join(f"w{4 + (row + word) % 24}" for word in range(4)) for row in range(16)]
    trainer = kind(model, even, settings, train_dataset=Dataset.from_dict({"prompt": prompts}))
    trainer.add_callback(Publish())
    return trainer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        build(folder).train()


if __name__ == "__main__":
    main()
