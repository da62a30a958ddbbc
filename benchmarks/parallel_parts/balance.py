"""How evenly each order of the sequence spreads the cost of sparse attention."""

from __future__ import annotations

import numpy as np
import torch

from primeblocks.parallel import SequencePlan, plan_sequence

__all__ = ["figures"]

TOKENS = 131_072
# GLM-5: index heads and their width, keys that a token attends to, heads, and FLOPs of a latent
# key for a head.
INDEX_HEADS, INDEX_DIM, SELECTED, HEADS, PER_KEY = 32, 128, 2048, 64, 2 * (512 + 64) + 2 * 512


def cost(positions: np.ndarray) -> np.ndarray:
    """The indexer looks at all tokens before, at float8's double rate and forward only; attention
    looks at those selected, and its backward costs 2.5 times its forward."""
    seen = positions + 1.0
    return INDEX_HEADS * INDEX_DIM * seen + 3.5 * np.minimum(SELECTED, seen) * HEADS * PER_KEY


def workloads() -> dict[str, list[int]]:
    generator = np.random.default_rng(0)
    answers: list[int] = []
    while (left := TOKENS - sum(answers)) > 0:
        answers.append(min(int(generator.lognormal(8.5, 1.2)) + 1, left))
    cuts = np.sort(generator.integers(1, TOKENS, 59))
    short = np.diff(np.concatenate([[0], cuts, [TOKENS]])).tolist()
    return {"one_document": [TOKENS], "rl_lengths": answers, "short_documents": short}


def max_over_mean(plan: SequencePlan) -> float:
    """Counted from the tokens that each rank holds, not taken from the plan."""
    everyone = torch.cat([plan.indices(rank) for rank in range(plan.ranks)])
    assert torch.equal(everyone.sort().values, torch.arange(TOKENS)), "a token is lost or doubled"
    paid = [cost(plan.positions(rank).numpy()).sum() for rank in range(plan.ranks)]
    return max(paid) / (sum(paid) / plan.ranks)


def figures() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    worst: dict[str, float] = {}
    for workload, lengths in workloads().items():
        for ranks in (8, 32):
            for order in ("contiguous", "zigzag", "balanced"):
                plan = plan_sequence(lengths, ranks=ranks, order=order, cost=cost)
                value = max_over_mean(plan)
                name = f"parallel.sequence.{order}.{workload}.{ranks}_ranks.max_over_mean"
                found[name] = (value, "ratio", "")
                worst[order] = max(worst.get(order, 0.0), value)
    for order, value in worst.items():
        found[f"parallel.sequence.{order}.max_over_mean"] = (value, "ratio", "")
    return found
