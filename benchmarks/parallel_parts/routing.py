"""Tokens on their way to experts and back, and what must come out, in closed form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["EXPERTS", "HIDDEN", "TOP_K", "Batch", "draw", "exact", "outputs_of_experts"]

TOP_K, HIDDEN, EXPERTS = 8, 2048, 64


class Batch(NamedTuple):
    """`grad` is that of the combined output."""

    x: Tensor
    scores: Tensor
    ids: Tensor
    grad: Tensor


def draw(tokens: int, dtype: torch.dtype, *, seed: int) -> Batch:
    """Random tokens that choose experts evenly; scores in float32, as routers give them."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    chosen = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K)
    scores = chosen.values / chosen.values.sum(1, keepdim=True)
    return Batch(x.requires_grad_(), scores.requires_grad_(), chosen.indices, grad)


def outputs_of_experts(rows: Tensor, counts: Tensor, *, first_expert: int = 0) -> Tensor:
    """Each expert multiplies by a factor of its own, so that a mix-up is seen.

    The factors are powers of two: nothing is rounded.
    """
    experts = torch.arange(first_expert, first_expert + len(counts))
    return rows * _factors(experts).repeat_interleave(counts)[:, None].to(rows.dtype)


def exact(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: the output, and the gradients of tokens and scores."""
    x, scores, grad = (t.detach().double() for t in (batch.x, batch.scores, batch.grad))
    factors = _factors(batch.ids)
    weight = (scores * factors).sum(1, keepdim=True)
    return x * weight, grad * weight, factors * (x * grad).sum(1, keepdim=True)


def _factors(experts: Tensor) -> Tensor:
    return 2.0 ** (experts.double() % 7 - 3)
