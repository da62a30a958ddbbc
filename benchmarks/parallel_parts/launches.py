"""How many kernels attention of one layer launches on one of eight ranks, counted on no device.

A step of `ring_attention` runs on meta tensors, its messages go nowhere, and plans and block lists
are real. An operator that is neither a view nor an allocation is one launch; FlexAttention's is one
forward and two backward, where torch sums rows of the output before its kernel. That is how it is
compiled; operators beside it, which a compiler may join, are counted one by one. The backward of
flash attention on packed sequences is five: sums of rows, its kernel, a cast of the queries'
gradients, and sums of those of keys and of values over the query heads of one key head. Lists are
planned before: the layers of a batch share them.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from primeblocks.parallel import SequencePlan, plan_sequence
from primeblocks.parallel.attention import (
    AttentionKernel,
    FlexKernel,
    RectangleKernel,
    VarlenKernel,
    ring_attention,
)
from primeblocks.testing.oracles import StepCounter

__all__ = ["count", "figures", "launches_of"]

_ORDERS = ("balanced", "zigzag")
RANKS, TOKENS, HEADS, KEY_HEADS, DIM = 8, 131_072, 32, 4, 128
# Memory is all that they take.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_SEVERAL = {"flex_attention_backward": 2, "_flash_attention_backward": 5}


def launches_of(operators: Counter[str]) -> int:
    """Kernels that these operators launch."""
    return sum(
        count * _SEVERAL.get(name, 1)
        for name, count in operators.items()
        if name not in _ALLOCATIONS
    )


def count(
    plan: SequencePlan, rank: int, kernel: AttentionKernel
) -> tuple[StepCounter, StepCounter]:
    """Count forward and backward of one layer on one rank, bfloat16, the plan's lists made."""
    tokens = plan.counts[rank]
    q, k, v = (
        torch.empty(tokens, heads, DIM, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    dist.init_process_group(
        "cpu:fake,meta:fake", rank=rank, world_size=plan.ranks, store=FakeStore()
    )
    try:
        for _ in range(2):
            with StepCounter(device="meta") as forward:
                out = ring_attention(
                    q, k, v, sequence=plan, group=dist.group.WORLD, check=False, kernel=kernel
                )
            with StepCounter(device="meta") as backward:
                out.backward(out.detach())
    finally:
        dist.destroy_process_group()
    return forward, backward


def figures() -> dict[str, tuple[float, str, str]]:
    """Of forward and backward together, and each, by kernel; the busiest rank's."""
    balanced, zigzag = (plan_sequence([TOKENS], ranks=RANKS, order=order) for order in _ORDERS)
    found: dict[str, tuple[float, str, str]] = {}
    name = "parallel.ring.launches_per_layer.131k_p8"
    last, every = (RANKS - 1,), range(RANKS)
    for suffix, plan, ranks, kernel in (
        ("", balanced, last, FlexKernel()),
        (".recompute", balanced, last, FlexKernel(recompute=True)),
        (".rectangles", balanced, last, RectangleKernel()),
        (".zigzag", zigzag, every, FlexKernel()),
        (".zigzag.varlen", zigzag, every, VarlenKernel()),
        (".zigzag.rectangles", zigzag, every, RectangleKernel()),
    ):
        by_rank = (count(plan, rank, kernel) for rank in ranks)
        parts = max(([launches_of(step.operators) for step in steps] for steps in by_rank), key=sum)
        found[f"{name}{suffix}"] = (sum(parts), "count", "")
        found[f"{name}{suffix}.forward"] = (parts[0], "count", "")
    return found
