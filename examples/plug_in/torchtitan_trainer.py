"""Plug a loss and a publisher into torchtitan 0.3.0's Trainer.

    torchrun --nproc-per-node 1 examples/plug_in/torchtitan_trainer.py

In addition to the tokens, a batch contains the engine's log-probabilities and the advantages. The
functions of torchtitan convert the published weights to the tensors of a checkpoint.
"""

import os
import tempfile
from functools import partial

import tiny
import torch
import torchtitan_on_cpu  # Import before torchtitan, whose import looks for a GPU.
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss, compute_logprobs
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from primeblocks import losses, weightsync

STEPS, LR, ROLLOUTS, TIMEOUT_S = 5, 3e-3, 8, 60.0


# glue
def policy_loss(engine, advantages, pred, labels, tokens, **_):
    logprobs, mask = compute_logprobs(pred, labels), labels != IGNORE_INDEX
    old = logprobs.detach()
    weights = losses.corrections.importance_weights(old, engine, mask=mask).weights
    loss = losses.grpo_loss(logprobs, old, advantages, mask=mask, weights=weights)
    return loss.sum / tokens, {}


class PolicyTrainer(Trainer):
    def post_dataloading_process(self, batch, labels):
        self.loss_fn = partial(policy_loss, batch.pop("engine_logprobs"), batch.pop("advantages"))
        return super().post_dataloading_process(batch, labels)

    def open_publisher(self, name):
        (model,) = self.model_parts
        wiring = weightsync.convert.record_wiring(self.to_hf, weightsync.describe(model))
        plan, memory = weightsync.announce(name, model, dtype=torch.bfloat16, convert=wiring)
        self.publisher = weightsync.Publisher(plan, model, memory, convert=wiring, full_every=4)

    def to_hf(self, tensors):
        for name in [name for name in tensors if name.endswith(".wqkv.weight")]:
            module = self.model_parts[0].get_submodule(name.removesuffix(".wqkv.weight"))
            FusedQKVLinear._split_qkv_on_save(module, tensors, name.removesuffix("wqkv.weight"), {})
        return self.config.model_spec.state_dict_adapter(self.model_config, None).to_hf(tensors)

    def train_step(self, batches):
        super().train_step(batches)
        self.publisher.publish(self.step, timeout_s=TIMEOUT_S)


# end of glue


def build(folder: str, *, steps: int = STEPS) -> PolicyTrainer:
    """Return a trainer that trains on all rollouts in every step."""
    trainer = PolicyTrainer(
        Trainer.Config(
            model_spec=torchtitan_on_cpu.tiny_spec(),
            dump_folder=folder,
            tokenizer=torchtitan_on_cpu.NoTokenizer.Config(),
            loss=CrossEntropyLoss.Config(),  # Replaced with each batch.
            dataloader=torchtitan_on_cpu.Batches.Config(rollouts=ROLLOUTS),
            metrics=MetricsProcessor.Config(log_freq=1),
            optimizer=default_adamw(lr=LR),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
            training=TrainingConfig(
                local_batch_size=ROLLOUTS // int(os.environ["WORLD_SIZE"]),
                seq_len=tiny.PROMPT + tiny.ANSWER - 1,
                steps=steps,
                mixed_precision_param="float32",
                disable_cuda_graphs=True,
            ),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        )
    )
    torchtitan_on_cpu.sum_on_gloo(trainer.model_parts[0])
    return trainer


def main() -> None:
    init_logger()  # prints the loss of each step
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(folder)
        trainer.open_publisher(f"torchtitan-{os.environ['MASTER_PORT']}")  # glue
        trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
