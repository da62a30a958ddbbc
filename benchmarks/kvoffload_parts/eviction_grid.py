"""Hits over a grid of waits, as shares of LRU's: what a policy costs where its guess is wrong.

64 short agents in flight with one tool, whose waits follow each of `WAITS`, behind an engine that
holds a share of their pages (`ENGINES`), with a tier that holds another share (`TIERS`); waits as
they are and cut off at 300 s; the tier told of ends, or not. `recorded` are the agents with real
tools of `eviction_traces`. A cell has the hits of all seeds together; one in which LRU has fewer
than `LEAST` is not judged, for a few pages more or less decide it. Deterministic.

    python -m benchmarks.kvoffload_parts.eviction_grid docs/figures/eviction_grid.svg
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median

from primeblocks.kvoffload.evict import Evict, RolloutAware, VersionAware, lru

from .eviction_engine import Ours, Queue, Resume, behind, play
from .eviction_fleets import Agents, Tool, simulate
from .eviction_fleets import Spread as LogNormal
from .eviction_traces import End, Trace, Wait, recorded

__all__ = ["ENGINES", "TIERS", "WAITS", "Cell", "Waits", "hits_of", "ratios"]

ENGINES = (0.05, 0.1, 0.2, 0.35, 0.5)
TIERS = (0.25, 0.5, 0.75, 1.0)
LEAST = 100
SEEDS = range(1000, 1002)
ANSWERS = LogNormal(600, 1.4, 20_000)
AGENTS = Agents(num_versions=6, page_tokens=2048)
RECORDED = {"recorded: 4 of 24": "queue", "recorded: all 24": "no_queue"}
POLICIES: Mapping[str, Callable[[], Evict]] = {
    "lru": lambda: lru,
    "VersionAware": lambda: VersionAware(8),
    "RolloutAware": lambda: RolloutAware(8),
}


@dataclass(frozen=True)
class Waits:
    """A distribution of seconds, by its draw; longer ones count as `most`."""

    drawn: Callable[[Random], float]
    most: float = math.inf

    def draw(self, random: Random) -> float:
        return min(self.drawn(random), self.most)


def _lognormal(middle: float, sigma: float) -> Waits:
    return Waits(LogNormal(middle, sigma).draw)


def _mixed(share: float, first: Waits, second: Waits) -> Waits:
    return Waits(lambda r: (first if r.random() < share else second).drawn(r))


WAITS: Mapping[str, Waits] = {
    "exponential 30 s": Waits(lambda r: r.expovariate(1 / 30)),
    "lognormal 30 s, 0.5": _lognormal(30, 0.5),
    "lognormal 30 s, 1.5": _lognormal(30, 1.5),
    "lognormal 30 s, 2.2": _lognormal(30, 2.2),
    "bimodal 3 or 300 s": _mixed(0.8, _lognormal(3, 0.5), _lognormal(300, 0.5)),
    "people 900 s, 1.5": _lognormal(900, 1.5),
    # Chosen after the policies were.
    "constant 30 s": Waits(lambda r: 30.0),
    "gamma 60 s, shape 0.3": Waits(lambda r: r.gammavariate(0.3, 200)),
    "gamma 60 s, shape 3": Waits(lambda r: r.gammavariate(3, 20)),
    "Pareto 5 s, 1.1": Waits(lambda r: 5 * r.paretovariate(1.1)),
    "Weibull 30 s, 0.5": Waits(lambda r: r.weibullvariate(30, 0.5)),
    "exponential 1 or 600 s": _mixed(
        0.5, Waits(lambda r: r.expovariate(1)), Waits(lambda r: r.expovariate(1 / 600))
    ),
}


@dataclass(frozen=True)
class Cell:
    """A place in the grid."""

    waits: str
    engine: float
    tier: float
    capped: bool = False
    told: bool = True


Hits = dict[Cell, dict[str, int]]


def hits_of(
    trace: Trace, cells: Iterable[Cell], policies: Mapping[str, Callable[[], Evict]] = POLICIES
) -> Hits:
    """Play the cells of one trace. Pure."""
    found: Hits = {}
    seen = {}
    for cell in cells:
        if cell.engine not in seen:
            engine_pages = round(cell.engine * trace.working_pages)
            seen[cell.engine] = behind(trace, engine_pages=engine_pages)
        pages = max(1, round(cell.tier * trace.working_pages))
        tells = (Wait, Resume, Queue, End) if cell.told else (Wait, Resume, Queue)
        found[cell] = {
            name: play(seen[cell.engine], Ours(made(), pages, tells=tells)).hits
            for name, made in policies.items()
        }
    return found


def traced(waits: str, *, capped: bool, seed: int) -> Trace:
    """Simulate the agents of one row. Pure."""
    if waits in RECORDED:
        return recorded(RECORDED[waits])
    spread = replace(WAITS[waits], most=300) if capped else WAITS[waits]
    tool = Tool("tool", spread, ANSWERS)  # type: ignore[arg-type]  # it draws, as a Spread does
    return simulate(replace(AGENTS, tools=(tool,)), seed=seed)


def _job(job: tuple[str, bool, int]) -> Hits:
    waits, capped, seed = job
    places = product(ENGINES, TIERS, (True, False))
    cells = [Cell(waits, engine, tier, capped, told) for engine, tier, told in places]
    return hits_of(traced(waits, capped=capped, seed=seed), cells)


def ratios(found: Hits, policy: str, over: str = "lru") -> dict[Cell, float]:
    """Return hits of a policy over another's, of the cells that are judged."""
    judged = {cell: hits for cell, hits in found.items() if hits["lru"] >= LEAST}
    return {cell: hits[policy] / max(1, hits[over]) for cell, hits in judged.items()}


def grid() -> Hits:
    """Play all cells: some ten minutes of one core."""
    jobs = [*product(WAITS, (False, True), SEEDS), *((name, False, 0) for name in RECORDED)]
    found: Hits = {}
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        for rows in pool.map(_job, jobs):
            for cell, hits in rows.items():
                total = found.setdefault(cell, dict.fromkeys(hits, 0))
                for name, count in hits.items():
                    total[name] += count
    return found


def picture(found: Hits) -> str:
    """Draw rows of waits and columns of engine shares, a panel for each policy, as SVG."""
    width, height, left, top = 46, 22, 170, 58
    panels = [
        ("VersionAware, worst cell", "VersionAware", min),
        ("RolloutAware, worst cell", "RolloutAware", min),
        ("RolloutAware, median", "RolloutAware", median),
    ]
    rows = [*WAITS, *RECORDED]
    across = len(ENGINES) * width + 16
    size = left + len(panels) * across, top + len(rows) * height + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        'font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (title, policy, of) in enumerate(panels):
        x = left + number * across
        parts.append(f'<text x="{x}" y="16" font-weight="bold">{title}</text>')
        found_ratios = ratios(found, policy)
        for column, engine in enumerate(ENGINES):
            at = x + column * width
            parts.append(f'<text x="{at + 8}" y="{top - 8}">{engine:g}</text>')
            for row, waits in enumerate(rows):
                here = [
                    ratio
                    for cell, ratio in found_ratios.items()
                    if (cell.waits, cell.engine) == (waits, engine)
                ]
                y = top + row * height
                value = of(here) if here else None
                parts.append(
                    f'<rect x="{at}" y="{y}" width="{width - 2}" height="{height - 2}" '
                    f'fill="{_colour(value)}"/><text x="{at + 7}" y="{y + 14}">'
                    f"{'few' if value is None else f'{value:.2f}'}</text>"
                )
        parts.append(f'<text x="{x}" y="33">engine holds</text>')
    parts += [
        f'<text x="8" y="{top + row * height + 14}">{name}</text>' for row, name in enumerate(rows)
    ]
    return "\n".join([*parts, "</svg>\n"])


def _colour(ratio: float | None) -> str:
    if ratio is None:
        return "#eeeeee"
    if ratio < 0.97:
        return "#f2a59b" if ratio < 0.8 else "#f8d3cc"
    return "#f7f7f7" if ratio < 1.03 else "#d5e8f5" if ratio < 1.5 else "#9cc8e8"


def main() -> None:
    """Play the grid, draw it to the path that is given, and say what is below the floor."""
    found = grid()
    Path(sys.argv[1]).write_text(picture(found))
    for policy in POLICIES:
        if policy == "lru":
            continue
        for over in ("lru", "VersionAware"):
            judged = ratios(found, policy, over)
            low = [(ratio, cell) for cell, ratio in judged.items() if ratio < 0.97]
            print(f"{policy} over {over}: {len(low)} of {len(judged)} cells below 0.97")
            for ratio, cell in sorted(low, key=lambda each: each[0])[:12]:
                print(f"  {ratio:.3f} {cell} {found[cell]}")
    print(f"{sum(hits['lru'] < LEAST for hits in found.values())} of {len(found)} not judged")


if __name__ == "__main__":
    main()
