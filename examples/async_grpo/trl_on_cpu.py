"""Run TRL 1.16's AsyncGRPOTrainer on a machine with or without a GPU.

TRL has no option for a machine without CUDA. The constructor of AsyncGRPOTrainer looks up the peak
FLOP rate of the CUDA device, which the trainer needs for its log. The attention is a FlashAttention
3 kernel from the model hub, for trees of samples with common prefixes. This file has a plain torch
function for the attention, and registers the function in transformers under the name of the kernel.
The function needs neither CUDA nor the model hub.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of each tree segment to the path from the root to the segment."""
    groups = query.shape[1] // key.shape[1]
    parts = []
    starts, ends = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for i in range(len(starts) - 1):
        path = tree_kv_index[ends[i] : ends[i + 1]]
        asked = query[:, :, starts[i] : starts[i + 1]]
        keys = key[:, :, path].repeat_interleave(groups, 1)
        values = value[:, :, path].repeat_interleave(groups, 1)
        scores = asked @ keys.transpose(-1, -2) * scaling
        before = len(path) - asked.shape[2]
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(before + 1)
        parts.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    return torch.cat(parts, 2).transpose(1, 2), None


def build(*args: Any, **kwargs: Any) -> async_grpo_trainer.AsyncGRPOTrainer:
    """Return an AsyncGRPOTrainer that runs on a machine with or without a GPU."""
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # The rate is unknown.
    trainer = async_grpo_trainer.AsyncGRPOTrainer(*args, **kwargs)
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    return trainer
