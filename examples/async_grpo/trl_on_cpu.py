"""Lets TRL 1.16's AsyncGRPOTrainer run without CUDA, which TRL itself does not support.

Two parts of the trainer need a GPU, and no setting turns them off. The constructor reads the name
of the CUDA device, because the trainer logs the rate of floating-point operations. The attention is
a FlashAttention 3 kernel from the model hub, over samples that share common prefixes as a tree.
This file registers the same attention in plain torch under the kernel's name, with transformers'
own registry.
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
    """Each segment of the tree attends, causally, to the path from the root to it."""
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
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(before + 1)
        parts.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    return torch.cat(parts, 2).transpose(1, 2), None


def build(*args: Any, **kwargs: Any) -> async_grpo_trainer.AsyncGRPOTrainer:
    """AsyncGRPOTrainer, on a machine with or without a GPU."""
    if torch.cuda.is_available():
        return async_grpo_trainer.AsyncGRPOTrainer(*args, **kwargs)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # "unknown", in its terms
    trainer = async_grpo_trainer.AsyncGRPOTrainer(*args, **kwargs)
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    return trainer
