"""Bytes of latent attention over ranks, over those of the latents that they lack."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import (
    latent_ring_attention,
    latent_ulysses_attention,
    ring_attention,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter

__all__ = ["figures"]

# The widths of DeepSeek-V3; fewer tokens, for bytes grow with them alone.
TOKENS, HEADS, NOPE, ROPE, VALUE, LATENT = 256, 128, 128, 64, 128, 512


def _count() -> dict[str, float]:
    group = dist.group.WORLD
    assert group is not None
    plan = plan_sequence([TOKENS], ranks=group.size(), order="zigzag")
    tokens = plan.counts[group.rank()]
    lacking = (TOKENS - tokens) * (LATENT + ROPE) * 2

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

    q, up = drawn(tokens, HEADS, NOPE + ROPE), drawn(HEADS, NOPE + VALUE, LATENT)
    latents = drawn(tokens, LATENT + ROPE)
    heads = drawn(tokens, HEADS, NOPE + ROPE), drawn(tokens, HEADS, VALUE)
    calls: dict[str, tuple[Any, tuple[torch.Tensor, ...], tuple[str, ...]]] = {
        "": (latent_ring_attention, (q, latents, up), ("recv_",)),
        "ulysses.": (
            latent_ulysses_attention,
            (q, latents, up),
            ("_allgather_base_", "_reduce_scatter_base_"),  # Queries are traded besides.
        ),
        "expanded.": (ring_attention, (q, *heads), ("recv_",)),
    }
    found = {}
    for name, (attention, operands, ways) in calls.items():
        call = partial(attention, sequence=plan, group=group, check=False)
        with StepCounter() as forward:
            out = call(*operands)
        with StepCounter() as backward:
            out.backward(out)
        for part, step in (("exchange", forward), ("backward", backward)):
            received = sum(step.received_bytes[way] for way in ways)
            found[f"parallel.mla.{name}{part}_bytes_over_latent"] = received / lacking
    return found


def figures() -> dict[str, tuple[float, str, str]]:
    """Of the rank that receives most, on four ranks in bfloat16."""
    by_rank = ranks.run(_count, world_size=4)
    return {name: (max(one[name] for one in by_rank), "ratio", "") for name in by_rank[0]}
