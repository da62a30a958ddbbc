"""Coding agents through routes: seconds until all are done, hits, and the collapse of one engine.

A figure is the median over three draws of tasks. In `tight` fleets an engine has cache enough for
its sessions where these are spread evenly, and not for those of the engine that a hash gives most.
In the others it has for all: `tools` wait mostly for tools, `answers` decode long answers, so that
a request slows others of its engine. `wall_clock_vs_consistent_hash` without a fleet is that of
`answers`: hit rates are equal there. `worst_engine` is the one where requests waited longest, in
the second half of a run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from primeblocks.async_loop.plan import EngineModel, decode_latency
from primeblocks.async_loop.plan.serving import (
    Serving,
    ServingModel,
    Session,
    Turn,
    simulate_serving,
)
from primeblocks.async_loop.routing import (
    PrefixAndLoad,
    Route,
    consistent_hash,
    least_loaded,
    round_robin,
)

__all__ = ["figures"]

SEEDS = (0, 1, 2)
SESSIONS = 250
PAGE_TOKENS, PREFILL_TOKENS_PER_S = 256, 12_000.0


@dataclass(frozen=True)
class Shape:
    """A fleet and what its agents do; `answer_tokens` and `tool_s` are medians."""

    engines: int
    in_flight: int
    cache_tokens: int
    answer_tokens: int
    tool_s: float
    request_s: float  # that one more request adds to a decode step of 12 ms

    def models(self) -> dict[str, ServingModel]:
        """Return the engines by name."""
        decode = EngineModel(decode_latency(step_s=0.012, request_s=self.request_s), max_running=64)
        pages = self.cache_tokens // PAGE_TOKENS
        model = ServingModel(decode, PREFILL_TOKENS_PER_S, pages, PAGE_TOKENS)
        return {f"engine-{place}": model for place in range(self.engines)}


FLEETS = {
    "tight": Shape(8, 72, 450_000, 250, 3.0, 0.0003),
    "tools": Shape(8, 72, 6_000_000, 250, 3.0, 0.0003),
    "answers": Shape(12, 144, 6_000_000, 500, 1.0, 0.001),
}
ROUTES: dict[str, Route] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "consistent_hash": consistent_hash,
    "prefix_and_load": PrefixAndLoad(),
}

Figures = dict[str, tuple[float, str, str]]


def tasks(count: int, shape: Shape, *, seed: int) -> list[Session]:
    """Draw coding tasks: 12 to 44 turns, contexts of 30k tokens on average and 120k at most."""
    draw = np.random.default_rng(seed)

    def tokens(median: float, sigma: float) -> int:
        return 1 + int(draw.lognormal(np.log(median), sigma))

    def turn(first: bool) -> Turn:
        new = tokens(4000, 0.5) if first else tokens(1200, 0.8)
        tool_s = float(draw.lognormal(np.log(shape.tool_s), 1.0))
        return Turn(new, tokens(shape.answer_tokens, 0.8), tool_s)

    return [
        Session(
            f"task-{task}",
            tuple(turn(first=not place) for place in range(int(draw.integers(12, 45)))),
            shared="system",
            shared_tokens=2048,
        )
        for task in range(count)
    ]


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


def figures(*, seeds: Sequence[int] = SEEDS, sessions: int = SESSIONS) -> Figures:
    """By fleet and route."""
    found: Figures = {}
    for fleet, shape in FLEETS.items():
        runs = {
            (route, seed): simulate_serving(
                tasks(sessions, shape, seed=seed),
                shape.models(),
                route=choose,
                in_flight=shape.in_flight,
            )
            for route, choose in ROUTES.items()
            for seed in seeds
        }
        for route in ROUTES:
            own = [runs[route, seed] for seed in seeds]
            against = [runs["consistent_hash", seed] for seed in seeds]
            ratio = [a.total_s / b.total_s for a, b in zip(own, against, strict=True)]
            values = {
                "wall_clock_vs_consistent_hash": (ratio, "ratio", "consistent_hash"),
                "total_s": ([each.total_s for each in own], "s", ""),
                "hit_rate": ([each.hit_rate for each in own], "ratio", ""),
                "wait_s": ([each.wait_s for each in own], "s", ""),
                "worst_engine.hit_rate": ([worst(each)[0] for each in own], "ratio", ""),
                "worst_engine.waiting": ([worst(each)[1] for each in own], "ratio", ""),
            }
            for name, (numbers, unit, peer) in values.items():
                figure = (statistics.median(numbers), unit, peer)
                found[f"serving.route.{fleet}.{route}.{name}"] = figure
    name = "wall_clock_vs_consistent_hash"
    found[f"serving.route.{name}"] = found[f"serving.route.answers.prefix_and_load.{name}"]
    return found
