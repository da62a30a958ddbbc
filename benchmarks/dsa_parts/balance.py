"""How evenly layouts spread the cost of sparse attention, models with an indexer at 131k tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.parallel_parts.balance import TOKENS
from primeblocks.parallel import plan_sequence
from primeblocks.planning.dsa import DsaSizes, dsa_cost

__all__ = ["MODELS", "figures", "table"]

# Indexers run in float8, at twice the rate.
MODELS = {
    "glm_5_2": DsaSizes(heads=64, index_heads=32, layers=78, index_layers=21, index_speed=2.0),
    "deepseek_v3_2": DsaSizes(
        heads=128, index_heads=64, layers=61, index_layers=61, index_speed=2.0
    ),
}
LAYOUTS = ("contiguous", "zigzag", "head_tail", "balanced")
RANKS = (8, 32)
SEEDS = 8


def workloads(seed: int) -> dict[str, list[int]]:
    """Documents of a packed batch: one, lengths as answers have them in RL, many short ones."""
    generator = np.random.default_rng(seed)
    answers: list[int] = []
    while (left := TOKENS - sum(answers)) > 0:
        answers.append(min(int(generator.lognormal(8.5, 1.2)) + 1, left))
    cuts = np.unique(generator.integers(1, TOKENS, 59))
    short = np.diff(np.concatenate([[0], cuts, [TOKENS]])).tolist()
    return {"one_document": [TOKENS], "rl_lengths": answers, "short_documents": short}


def held(lengths: Sequence[int], layout: str, ranks: int, sizes: DsaSizes) -> list[np.ndarray]:
    """By rank, the positions of its tokens inside their documents."""
    if layout != "head_tail":
        plan = plan_sequence(lengths, ranks=ranks, order=layout, cost=dsa_cost(sizes))
        found = [plan.positions(rank).numpy() for rank in range(ranks)]
    else:  # Each document in 2 x ranks chunks, as if padded; a rank takes one of each end.
        parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        for length in lengths:
            chunk = -(-length // (2 * ranks))
            for rank in range(ranks):
                for place in (rank, 2 * ranks - 1 - rank):
                    parts[rank].append(np.arange(length)[place * chunk : (place + 1) * chunk])
        found = [np.concatenate(own) for own in parts]
    together = np.sort(np.concatenate(found))
    every = np.sort(np.concatenate([np.arange(length) for length in lengths]))
    assert np.array_equal(together, every), "a token is lost or doubled"
    return found


def paid(positions: np.ndarray, sizes: DsaSizes) -> tuple[float, float]:
    """FLOPs of a rank's tokens in one layer, forward: the indexer's and those of attention.

    By the definition, and not by the plan.
    """
    seen = positions + 1.0
    indexer = 2.0 * sizes.index_heads * sizes.index_dim * seen[seen > sizes.top_k].sum()
    read = np.minimum(seen, sizes.top_k).sum() * sizes.heads
    return float(indexer), float(2.0 * read * (sizes.key_dim + sizes.value_dim))


def max_over_mean(costs: Sequence[float]) -> float:
    mean = sum(costs) / len(costs)
    return max(costs) / mean if mean else 1.0


def in_step(costs: Sequence[tuple[float, float]], sizes: DsaSizes) -> float:
    """The busiest rank over the mean where ranks wait for each other in every layer.

    A rank with much to score and little to attend to would be balanced over all layers, and still
    make the others wait in some of them.
    """
    selecting = [indexer / sizes.index_speed + attention for indexer, attention in costs]
    sharing = [attention for _, attention in costs]
    backward = [2.5 * attention for _, attention in costs]
    layers = (sizes.index_layers, sizes.layers - sizes.index_layers, sizes.layers)
    waited = paced = 0.0
    for count, each in zip(layers, (selecting, sharing, backward), strict=True):
        waited += count * max(each)
        paced += count * sum(each) / len(each)
    return waited / paced


def table() -> list[tuple[str, str, int, str, float, float]]:
    """Model, workload, ranks, layout, and the worst max over mean of all seeds: whole, indexer."""
    rows = []
    for model, sizes in MODELS.items():
        for workload in workloads(0):
            for ranks in RANKS:
                for layout in LAYOUTS:
                    whole = indexer = 1.0
                    for seed in range(1 if workload == "one_document" else SEEDS):
                        own = held(workloads(seed)[workload], layout, ranks, sizes)
                        costs = [paid(positions, sizes) for positions in own]
                        whole = max(whole, in_step(costs, sizes))
                        indexer = max(indexer, max_over_mean([one for one, _ in costs]))
                    rows.append((model, workload, ranks, layout, whole, indexer))
    return rows


def figures() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    for model, workload, ranks, layout, whole, indexer in table():
        name = f"dsa.load.{model}.{workload}.p{ranks}.{layout}"
        found[f"{name}.max_over_mean"] = (whole, "ratio", "")
        found[f"{name}.indexer_max_over_mean"] = (indexer, "ratio", "")
        if layout == "balanced":
            worst = f"dsa.load.max_over_mean.p{ranks}"
            found[worst] = (max(whole, found.get(worst, (0.0,))[0]), "ratio", "")
    return found
