"""Bytes that leave a rank, counted in the collectives of both dispatchers, beside a formula."""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import torch
import torch.distributed as dist

from primeblocks.parallel.experts import AllToAllDispatcher, OncePerRankDispatcher, TokenDispatcher
from primeblocks.testing import ranks
from primeblocks.testing.oracles import StepCounter, max_relative_error

from .routing import EXPERTS, HIDDEN, TOP_K, draw, exact, outputs_of_experts

__all__ = ["figures"]

TOKENS = 1024  # of each rank
DISPATCHERS: dict[str, Callable[[dist.ProcessGroup], TokenDispatcher]] = {
    "once_per_choice": AllToAllDispatcher,
    "once_per_rank": OncePerRankDispatcher,
}


def _count() -> dict[str, tuple[int, float]]:
    """On one rank, by dispatcher: bytes received, forward and backward, and the largest error."""
    group = dist.group.WORLD
    assert group is not None
    rank, share = group.rank(), EXPERTS // group.size()
    batch = draw(TOKENS, torch.bfloat16, seed=rank)
    found = {}
    for name, kind in DISPATCHERS.items():
        dispatcher = kind(group)
        with StepCounter() as step:
            sent = dispatcher.dispatch(batch.x, batch.scores, batch.ids, num_experts=EXPERTS)
            y = outputs_of_experts(sent.tokens, sent.counts, first_expert=rank * share)
            out = dispatcher.combine(y, sent)
            grads = torch.autograd.grad(out, (batch.x, batch.scores), batch.grad)
        pairs = zip((out, *grads), exact(batch), strict=True)
        found[name] = (step.received_bytes.total(), max(max_relative_error(a, e) for a, e in pairs))
    return found


def expected_bytes(name: str, world_size: int) -> float:
    """What one token costs on average, with experts chosen evenly."""
    far = world_size - 1
    row = HIDDEN * 2
    if name == "once_per_choice":
        return 4 * TOP_K * far / world_size * row  # there and back, forward and backward
    # The experts are distinct: draws without replacement.
    nothing_there = comb(EXPERTS - EXPERTS // world_size, TOP_K) / comb(EXPERTS, TOP_K)
    choices = TOP_K * (4 + 4 + 4)  # its number, its score, and the gradient of the score
    return far * (1 - nothing_there) * (4 * row + choices)


def figures() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    for world_size in (2, 4):
        by_rank = ranks.run(_count, world_size=world_size)
        error = max(error for one in by_rank for _, error in one.values())
        assert error < 0.02, f"the relative error is {error}"
        counted = {}
        for name in DISPATCHERS:
            sent = sum(one[name][0] for one in by_rank) / (world_size * TOKENS)
            formula = expected_bytes(name, world_size)
            assert abs(sent / formula - 1) < 0.02, f"{name}: {sent} bytes; expected {formula}"
            prefix = f"parallel.dispatch.{name}.ep{world_size}"
            found[f"{prefix}.bytes_per_token"] = (sent, "B", "")
            found[f"{prefix}.bytes_per_token_formula"] = (formula, "B", "")
            counted[name] = sent
        ratio = counted["once_per_rank"] / counted["once_per_choice"]
        name = f"parallel.dispatch.bytes_ratio_once_per_rank_ep{world_size}_top{TOP_K}"
        found[name] = (ratio, "ratio", "a row for each choice")
    return found
