"""Pages of agentic rollouts that are still there when asked for, by policy.

Simulated and deterministic; no clock is read. Fleets of 64 rollouts in flight, in groups of 8 on
one engine; pages of 512 tokens; a prompt of 2048 system tokens and about 2000 more; 40 tokens a
second; a version for every 16 finished rollouts; contexts end at 32768 tokens. Medians, with the
standard deviation of the logarithm:

- coding: 15 turns (0.6), answers of 200 tokens (0.8), tools that take 3 s (1.5, so some take
  minutes) and answer with 400 tokens (1.0); at most 8 versions behind, which drops two in
  a hundred.
- fresh: the same, at most 4 versions behind, which drops one in five.
- tests: as coding, but each tool call is a test suite of 30 s (0.5).
- search: 8 turns (0.5), tools that take 1 s (0.5) and answer with 1500 tokens (0.7); a version for
  every 64 rollouts.

A capacity is a share of the pages of the rollouts in flight, the median over all requests. A hit is
a page that was asked for, by a rollout that the trainer may still use, and was there. The requests
that fill the tier at the start count as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from primeblocks.kvoffload import VersionAware, arc, lru
from primeblocks.kvoffload.belady import belady, play
from primeblocks.kvoffload.traces import Agents, Spread, Trace, simulate

__all__ = ["figures"]

CODING = Agents()
FLEETS = {
    "coding": CODING,
    "fresh": replace(CODING, max_staleness=4),
    "tests": replace(CODING, tool_s=Spread(30, 0.5)),
    "search": replace(
        CODING,
        batch=64,
        versions=6,
        turns=Spread(8, 0.5, 30),
        tool_tokens=Spread(1500, 0.7, 8000),
        tool_s=Spread(1, 0.5),
    ),
}
CAPACITIES = (0.25, 0.5, 0.75, 1.0, 1.5)
SEEDS = 3

Rates = dict[str, float]


def figures(*, seeds: int = SEEDS) -> dict[str, tuple[float, str, str]]:
    """Medians over all fleets, capacities and seeds, and for each capacity, after a table."""
    found: dict[float, list[Rates]] = {share: [] for share in CAPACITIES}
    head = ("rollouts", "capacity", "lru", "arc", "version", "belady", "/lru", "/belady", "min")
    print("hit rates, medians of seeds; min: the least of version/belady")
    print("".join(f"{name:>10}" for name in head))
    for name, agents in FLEETS.items():
        traces = [simulate(agents, seed=seed) for seed in range(seeds)]
        for share in CAPACITIES:
            rates = []
            for trace in traces:
                pages = max(1, round(share * trace.working_pages))
                rates.append(_rates(trace, pages, VersionAware(agents.max_staleness)))
            print(_row(name, share, rates))
            found[share] += rates
    everything = [rate for rates in found.values() for rate in rates]
    answer = {
        "kvoffload.evict.hit_ratio_vs_lru": (_over(everything, "lru"), "ratio", "LRU"),
        "kvoffload.evict.hit_ratio_vs_arc": (_over(everything, "arc"), "ratio", "ARC"),
        "kvoffload.evict.fraction_of_belady": (_over(everything, "belady"), "ratio", "Belady"),
    }
    for share, rates in found.items():
        where = f"capacity_{share:.0%}".rstrip("%")
        ratios = _over(rates, "lru"), _over(rates, "belady")
        answer[f"kvoffload.evict.hit_ratio_vs_lru.{where}"] = (ratios[0], "ratio", "LRU")
        answer[f"kvoffload.evict.fraction_of_belady.{where}"] = (ratios[1], "ratio", "Belady")
    return answer


def _rates(trace: Trace, pages: int, version_aware: VersionAware) -> Rates:
    policies = {"lru": lru, "arc": arc, "version": version_aware}
    played = {
        name: play(trace, evict=evict, capacity_pages=pages) for name, evict in policies.items()
    }
    played["belady"] = belady(trace, capacity_pages=pages)
    return {name: outcome.hit_rate for name, outcome in played.items()}


def _over(rates: Sequence[Rates], other: str) -> float:
    return median(rate["version"] / rate[other] for rate in rates)


def _row(name: str, share: float, rates: Sequence[Rates]) -> str:
    medians = [median(rate[policy] for rate in rates) for policy in rates[0]]
    least = min(rate["version"] / rate["belady"] for rate in rates)
    ratios = [_over(rates, "lru"), _over(rates, "belady"), least]
    return f"{name:>10}{share:>10}" + "".join(f"{value:>10.3f}" for value in medians + ratios)
