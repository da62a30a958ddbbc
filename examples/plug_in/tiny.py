"""A tiny model and a fixed batch of rollouts, for the examples in this folder."""

import torch
from torch import Tensor, nn

from primeblocks.testing import tiny_models

__all__ = ["ANSWER", "PROMPT", "SIZES", "model", "rollouts"]

SIZES = {"num_layers": 1, "hidden": 32, "num_experts": 4, "top_k": 2, "vocab": 32, "init_std": 0.1}
PROMPT, ANSWER = 4, 8  # tokens


def model(dtype: str = "float32") -> nn.Module:
    """Build a tiny model. The weights are equal in all calls."""
    return tiny_models.build("qwen3_moe", dtype=dtype, **SIZES)


@torch.no_grad()
def rollouts(count: int = 8) -> dict[str, Tensor]:
    """Return random answers, and their log-probabilities in a bfloat16 model with noisy weights.

    The advantage of a rollout is its share of even tokens, minus the mean share of the batch.
    """
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(4, SIZES["vocab"], (count, PROMPT + ANSWER), generator=chance)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, PROMPT:] = True
    mask[0, -3:] = False  # The first answer is shorter.
    engine = model("bfloat16")
    for parameter in engine.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=chance))
    scores = engine(ids[:, :-1]).logits.float().log_softmax(-1)
    logprobs = torch.zeros(ids.shape)
    logprobs[:, 1:] = scores.gather(-1, ids[:, 1:, None])[..., 0]
    rewards = ((ids % 2 == 0) * mask).sum(1) / mask.sum(1)
    advantages = (rewards - rewards.mean())[:, None].expand(ids.shape)
    return {
        "input_ids": ids,
        "mask": mask,
        "engine_logprobs": logprobs,
        "advantages": advantages.contiguous(),
    }
