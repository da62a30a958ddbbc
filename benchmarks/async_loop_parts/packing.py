"""Imbalance of FLOPs over ranks, on 1,000 batches with lengths as RL has them, and two peers'.

A batch has 256 to 1,024 rollouts, a multiple of 32, of 16 to 131,072 tokens, lognormal, Pareto,
bimodal or with an agent's long tail; its micro-batches hold 131,072 tokens. All balance the FLOPs
of `sequence_flops()`. verl's function is its own, loaded from its wheel, and gives each rank as
many rollouts; prime-rl's algorithm is spelled out here: first fit, the costliest bins cut until
their number divides, differencing with as many bins on each rank, exchanges of bins.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primeblocks.losses.packing import PackingPlan, plan_packing, sequence_flops
from primeblocks.losses.packing.partition import first_fit_decreasing

__all__ = ["draws", "figures"]

BATCHES, LONGEST, RANKS = 1000, 131_072, (8, 32)
PEER_BATCHES = 100  # Their functions take half a second and more each.
COST = sequence_flops()


def draws(count: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Name of a family, and lengths."""
    for seed in range(count):
        g = np.random.default_rng(seed)
        n = 32 * int(g.integers(8, 33))
        name = ("lognormal", "pareto", "bimodal", "agentic")[seed % 4]
        if name == "lognormal":
            x = g.lognormal(g.uniform(6, 9), g.uniform(0.5, 1.5), n)
        elif name == "pareto":
            x = 200 * g.uniform(1, 8) * (1 + g.pareto(g.uniform(0.8, 2.5), n))
        elif name == "bimodal":
            long = g.lognormal(np.log(g.uniform(16e3, 65e3)), 0.25, n)
            short = g.lognormal(np.log(g.uniform(500, 4000)), 0.4, n)
            x = np.where(g.random(n) < g.uniform(0.05, 0.6), long, short)
        else:
            tail = g.random(n) < g.uniform(0.02, 0.2)
            x = np.where(tail, g.uniform(32e3, LONGEST, n), g.lognormal(8, 1, n))
        yield name, x.astype(np.int64).clip(16, LONGEST)


def _verl() -> ModuleType | None:
    """Its functions alone: what the module imports beside torch wants ray."""
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / "utils" / "seqlen_balancing.py"
    spec = importlib.util.spec_from_file_location("verl_seqlen_balancing", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    parents = ("verl", "verl.utils", "verl.protocol", "verl.utils.device")
    empty: dict[str, Any] = {name: ModuleType(name) for name in parents}
    empty["verl.protocol"].DataProto = None
    empty["verl.utils"].tensordict_utils = None
    empty["verl.utils.device"].get_device_name = None
    before = {name: sys.modules.get(name) for name in parents}
    sys.modules.update(empty)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
    return module


def prime_rl(lengths: NDArray[np.int64], ranks: int, verl: ModuleType) -> list[list[list[int]]]:
    """Rollouts by rank and micro-batch."""
    paid = COST(lengths)
    bins = first_fit_decreasing(lengths.tolist(), LONGEST)
    while len(bins) % ranks and any(len(part) > 1 for part in bins):
        at = max(
            (i for i, part in enumerate(bins) if len(part) > 1), key=lambda i: paid[bins[i]].sum()
        )
        halves: tuple[list[int], list[int]] = ([], [])
        for i in sorted(bins[at], key=lambda i: -paid[i]):
            halves[bool(paid[halves[0]].sum() > paid[halves[1]].sum())].append(i)
        bins[at] = halves[0]
        bins.append(halves[1])
    bins += [[] for _ in range(-len(bins) % ranks)]
    weights = np.array([paid[part].sum() for part in bins])
    dealt = verl.karmarkar_karp(weights.tolist(), ranks, True)
    _exchange(weights, dealt)
    return [[bins[i] for i in own] for own in dealt]


def _exchange(weights: NDArray[np.float64], parts: list[list[int]]) -> None:
    """The best exchange of two bins, while it lowers the largest sum or the spread."""
    while True:
        sums = np.array([weights[part].sum() for part in parts])
        best = (sums.max(), sums.max() - sums.min())
        swap = None
        for a in range(len(parts)):
            for b in range(a + 1, len(parts)):
                # Others do not change: without these two.
                rest = np.delete(sums, [a, b])
                top, low = rest.max(initial=0.0), rest.min(initial=np.inf)
                change = weights[parts[b]][None] - weights[parts[a]][:, None]
                one, other = sums[a] + change, sums[b] - change
                most = np.maximum(np.maximum(one, other), top)
                spread = most - np.minimum(np.minimum(one, other), low)
                at = np.lexsort((spread.ravel(), most.ravel()))[0]
                score = (most.flat[at], spread.flat[at])
                if score < best and score[0] < best[0] * (1 - 1e-12):
                    best, swap = score, (a, b, *np.unravel_index(at, change.shape))
        if swap is None:
            return
        a, b, i, j = swap
        parts[a][i], parts[b][j] = parts[b][j], parts[a][i]


def _check(plan: PackingPlan, lengths: NDArray[np.int64]) -> None:
    every = [i for own in plan.micro_batches for part in own for i in part]
    assert sorted(every) == list(range(len(lengths))), "a rollout is lost or doubled"
    assert len({len(own) for own in plan.micro_batches}) == 1, "ranks differ in micro-batches"
    for own in plan.micro_batches:
        assert all(lengths[list(part)].sum() <= LONGEST for part in own), "above the budget"


def _waste(plan: PackingPlan) -> float:
    """The share of all micro-batches' budgets that has no token."""
    return 1 - sum(plan.lengths) / (LONGEST * sum(map(len, plan.micro_batches)))


def _measured(costs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The busiest rank, and the sum over steps of the busiest, over the mean."""
    mean = sum(map(sum, costs)) / len(costs)
    steps = zip(*costs, strict=True)
    return max(map(sum, costs)) / mean, sum(map(max, steps)) / mean


def figures() -> dict[str, tuple[float, str, str]]:
    verl = _verl()
    found: dict[str, tuple[float, str, str]] = {}
    for ranks in RANKS:
        ours, theirs, prime = [], [], []
        for seed, (_, lengths) in enumerate(draws(BATCHES)):
            paid = COST(lengths)
            mean, least = paid.sum() / ranks, max(paid.sum() / ranks, paid.max())
            rules: dict[str, Any] = {"ranks": ranks, "budget_tokens": LONGEST}
            plan = plan_packing(lengths.tolist(), **rules)
            _check(plan, lengths)
            busiest, waits = _measured(plan.costs)
            by_least = busiest * mean / least
            row = [by_least, busiest / plan.bound_over_mean, busiest, waits, _waste(plan)]
            if seed < PEER_BATCHES:
                steps = plan_packing(lengths.tolist(), **rules, balance="steps")
                _check(steps, lengths)
                row += [_measured(steps.costs)[1], _waste(steps)]
            ours.append(row)
            if verl is None or seed >= PEER_BATCHES:
                continue
            parts = verl.get_seqlen_balanced_partitions(paid.tolist(), ranks, equal_size=True)
            theirs.append(max(paid[part].sum() for part in parts) / least)
            dealt = prime_rl(lengths, ranks, verl)
            of_bins = [[float(paid[part].sum()) for part in own] for own in dealt]
            busiest, waits = _measured(of_bins)
            bins = sum(map(len, dealt))
            prime.append([busiest * mean / least, waits, 1 - lengths.sum() / (bins * LONGEST)])
        found |= _rows(f"p{ranks}", ours, theirs, prime)
    return found


def _rows(
    at: str, ours: list[list[float]], theirs: list[float], prime: list[list[float]]
) -> dict[str, tuple[float, str, str]]:
    name, least, mean = "async_loop.packing", "max(mean, longest)", "mean"
    every = np.array([row[:5] for row in ours])
    same = np.array([row for row in ours if len(row) > 5])
    found = {
        f"{name}.flops_max_over_mean.{at}": (every[:, 0].max(), "ratio", least),
        f"{name}.flops_max_over_mean.median.{at}": (np.median(every[:, 0]), "ratio", least),
        f"{name}.flops_max_over_mean.above_1.02.{at}": (
            float((every[:, 0] > 1.02).sum()),
            f"of {len(every)} batches",
            least,
        ),
        f"{name}.flops_max_over_bound.{at}": (every[:, 1].max(), "ratio", "least of any plan"),
        f"{name}.in_step.ranks.{at}": (same[:, 3].mean(), "ratio", mean),
        f"{name}.in_step.steps.{at}": (same[:, 5].mean(), "ratio", mean),
        f"{name}.waste.ranks.{at}": (same[:, 4].mean(), "share", ""),
        f"{name}.waste.steps.{at}": (same[:, 6].mean(), "share", ""),
    }
    if theirs:
        peers = np.array(prime)
        verl, other = f"{least}; verl 0.9.1, equal counts", f"{least}; prime-rl's algorithm"
        found |= {
            f"{name}.verl.flops_max_over_mean.{at}": (max(theirs), "ratio", verl),
            f"{name}.verl.flops_max_over_mean.median.{at}": (np.median(theirs), "ratio", verl),
            f"{name}.prime_rl.flops_max_over_mean.{at}": (peers[:, 0].max(), "ratio", other),
            f"{name}.prime_rl.flops_max_over_mean.median.{at}": (
                np.median(peers[:, 0]),
                "ratio",
                other,
            ),
            f"{name}.prime_rl.in_step.{at}": (peers[:, 1].mean(), "ratio", mean),
            f"{name}.prime_rl.waste.{at}": (peers[:, 2].mean(), "share", ""),
        }
    return {key: (float(value), unit, peer) for key, (value, unit, peer) in found.items()}
