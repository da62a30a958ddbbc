"""Memory of an indexer's scores: planned at 131,072 tokens, measured at 16,384."""

from __future__ import annotations

import torch

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa
from primeblocks.planning.dsa import dsa_cost, plan_dsa
from primeblocks.testing.oracles import StepCounter

from .balance import MODELS

__all__ = ["figures"]

RANKS = 8


def measured(tokens: int, chunk_bytes: int) -> tuple[int, int]:
    """Bytes at the peak of the last rank's selection, and those that are planned."""
    sizes = MODELS["glm_5_2"]
    plan = plan_sequence([tokens], ranks=RANKS, order="contiguous")
    planned = plan_dsa(plan, sizes, chunk_bytes=chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    own = plan.counts[-1]
    q = torch.randn(own, 4, sizes.index_dim, generator=generator)
    keys = torch.randn(tokens, sizes.index_dim, generator=generator)
    weights = torch.randn(own, 4, generator=generator)
    selector = dsa.TopK(sizes.top_k, chunk_bytes=chunk_bytes)
    rules = {"sequence": plan, "rank": RANKS - 1, "scores": dsa.index_scores}
    with StepCounter() as step, torch.no_grad():
        indices = selector.select(q, weights, keys, **rules)
    expected = keys @ q[-1].T
    expected = (expected.relu() * weights[-1]).sum(1).topk(sizes.top_k).indices.sort().values
    agree = len(set(indices[-1, 0].tolist()) & set(expected.tolist())) / sizes.top_k
    assert agree > 0.999, f"the last query shares {agree} of its selection with torch.topk"
    return step.peak_bytes - indices.nbytes, planned.score_bytes


def figures() -> dict[str, tuple[float, str, str]]:
    sizes = MODELS["glm_5_2"]
    plan = plan_sequence([131_072], ranks=RANKS, cost=dsa_cost(sizes))
    planned = plan_dsa(plan, sizes)
    tokens, full = 16_384, 16_384 // RANKS * 16_384 * 4
    taken, said = measured(tokens, chunk_bytes=1 << 20)
    assert taken <= said, f"{taken} bytes at the peak; planned {said}"
    return {
        "dsa.score_memory.fraction_of_full": (planned.score_fraction, "ratio", "[n, N] float32"),
        "dsa.score_memory.planned_131072_tokens": (planned.score_bytes, "B", ""),
        "dsa.score_memory.measured_16384_tokens": (taken, "B", ""),
        "dsa.score_memory.measured_fraction_of_full": (taken / full, "ratio", "[n, N] float32"),
    }
