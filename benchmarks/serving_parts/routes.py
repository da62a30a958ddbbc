"""Coding agents through routes: seconds until all are done, hits, and the collapse of one engine.

A figure is the median over draws of tasks; ratios to `consistent_hash` are those of one draw each.
Parameters of routes were chosen on the first draw: it is left out where there are more than three.
`wall_clock_vs_consistent_hash` without a fleet is that of `prefix_and_load_1` in `recorded`.
`worst_engine` is the one where requests waited longest, in the second half of a run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

from benchmarks.serving_parts.simulator import Serving, simulate_serving

from .fleets import FLEETS, Shape, routes

__all__ = ["figures"]

Figures = dict[str, tuple[float, str, str]]


def worst(serving: Serving) -> tuple[float, float]:
    """Return hit rate and share of requests' waiting of the engine where they waited most."""
    late = [each for each in serving.requests if each.end_s > serving.total_s / 2]
    waits = Counter[str]()
    for each in late:
        waits[each.engine] += each.wait_s  # type: ignore[assignment]
    name = waits.most_common(1)[0][0]
    own = [each for each in late if each.engine == name]
    hits = sum(each.hit_tokens for each in own) / sum(each.prompt_tokens for each in own)
    return hits, waits[name] / sum(waits.values())


def served(shape: Shape, route: str, seed: int) -> dict[str, float]:
    """Play one draw through one route."""
    model = shape.model()
    serving = simulate_serving(
        shape.tasks(seed=seed),
        {f"engine-{place}": model for place in range(shape.engines)},
        route=routes()[route],
        in_flight=shape.in_flight,
    )
    hits, waiting = worst(serving)
    return {
        "total_s": serving.total_s,
        "hit_rate": serving.hit_rate,
        "wait_s": serving.wait_s,
        "worst_engine.hit_rate": hits,
        "worst_engine.waiting": waiting,
    }


def figures(*, fleets: Iterable[str] = tuple(FLEETS)) -> Figures:
    """By fleet and route."""
    found: Figures = {}
    name = "wall_clock_vs_consistent_hash"
    for fleet in fleets:
        shape = FLEETS[fleet]
        seeds = shape.seeds if len(shape.seeds) <= 3 else shape.seeds[1:]
        hashed: list[float] = []
        for route in routes():  # the hash first
            runs = [served(shape, route, seed) for seed in seeds]
            hashed = hashed or [run["total_s"] for run in runs]
            for what in runs[0]:
                unit = "s" if what.endswith("_s") else "ratio"
                median = statistics.median(run[what] for run in runs)
                found[f"serving.route.{fleet}.{route}.{what}"] = (median, unit, "")
            ratios = [run["total_s"] / base for run, base in zip(runs, hashed, strict=True)]
            for bound, value in (
                ("", statistics.median(ratios)),
                (".least", min(ratios)),
                (".most", max(ratios)),
            ):
                key = f"serving.route.{fleet}.{route}.{name}{bound}"
                found[key] = (value, "ratio", "consistent_hash")
    if "recorded" in fleets:
        found[f"serving.route.{name}"] = found[f"serving.route.recorded.prefix_and_load_1.{name}"]
    return found
