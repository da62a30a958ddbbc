"""Pages of agentic rollouts that are still there when asked for, by policy.

Simulated and deterministic; no clock is read. 64 rollouts in flight, in groups of 8 of one prompt;
40 tokens a second; a version for every 16 finished rollouts, and groups that are 8 versions old are
dropped. Medians, with the standard deviation of the logarithm in brackets.

The family of the figures, `engine`: coding agents on an engine that has room for 8, 16 or 32 of the
64 rollouts (one with room for all would need no tier below it); the others wait for a tool, or in
the engine's queue, turn by turn. 12288 system tokens and 1500 of the prompt (0.8), 30 turns (0.5),
answers of 230 tokens (1.2) and of tools of 600 (1.4), contexts that end at 131072 tokens: like the
trials of SWE-bench Pro in Inferact/codex_swebenchpro_traces (30 calls, p90 57; 12278 tokens at the
start and 84482 at the end; 520 written a call on average). Tools by shares and times of 430,000
calls (Zhu et al., TraceLab, arXiv:2606.30560: 76 % shell with a median of 0.85 s and a p99 of
235 s, 11 % edits of 95 ms, 9 % reads of 36 ms; of all 61 % below 1 s, 27 % below 10 s, 8 % below
1 min), at most 300 s. The shell is four kinds of commands, as Continuum (Li et al.,
arXiv:2511.02230) tells tools apart by a command's first word. That split is ours, such that those
numbers come out (0.9 s and 150 s; 60 %, 27 %, 9 %). Other families, printed beside:

- `one_shell`: the same with room for 16, where the tier is told "shell" for all four.
- `all_run`: the same, where the engine has room for all, so nobody queues.
- `independent`: four fleets without queues, whose pauses nothing announces. coding: 15 turns (0.6),
  answers of 200 tokens (0.8), one tool of 3 s (1.5) and 400 tokens (1.0). fresh: at most 4 versions
  behind, which drops one in five. tests: a tool of 30 s (0.5). search: 8 turns (0.5), a tool of
  1 s (0.5) and 1500 tokens (0.7); a version for every 64 rollouts.

A capacity is a share of the pages of the rollouts in flight, the median over all requests. A hit is
a page that was asked for, by a rollout that the trainer may still use, and was there; `prefix`
counts those that were there with all pages before them, which an engine can use. Requests that fill
the tier at the start count as well. LRU, ARC and Belady make no
use of what rollouts wait for; `untold` is `VersionAware` with named rollouts alone. Belady knows
how long each answer and each tool will take; `bound`, of families without a queue, is the most that
a policy without such knowledge can have (`eviction_bound`). Reported seeds start at 0; the policy
was chosen on seeds from 101 on, and has no constants that were fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from statistics import median

from primeblocks.kvoffload.evict.belady import belady, play
from primeblocks.kvoffload.evict.fleets import Agents, Spread, Tool, simulate

from primeblocks.kvoffload.evict import VersionAware, arc, lru

from .eviction_bound import bound

__all__ = ["figures"]

ANSWERS = Spread(600, 1.4, 20_000)
SHELL = {"look": (0.4, 0.58), "script": (2.5, 0.26), "test": (15, 0.11), "build": (60, 0.05)}


def tools(*, shell: str | None = None) -> tuple[Tool, ...]:
    """TraceLab's; `shell` names all four kinds of commands."""
    commands = (
        Tool(shell or name, Spread(seconds, 1.0, 300), ANSWERS, share=0.76 * share)
        for name, (seconds, share) in SHELL.items()
    )
    return (
        Tool("read", Spread(0.036, 1.5, 300), ANSWERS, share=0.09),
        Tool("edit", Spread(0.095, 1.0, 300), ANSWERS, share=0.11),
        *commands,
        Tool("web", Spread(8, 1.2, 300), ANSWERS, share=0.01),
        Tool("agent", Spread(20, 1.5, 300), ANSWERS, share=0.012),
        Tool("other", Spread(1, 2.0, 300), ANSWERS, share=0.021),
    )


ALL_RUN = Agents(
    step_s=60,
    num_versions=8,
    system_tokens=12_288,
    prompt_tokens=Spread(1500, 0.8, 8000),
    turns=Spread(30, 0.5, 100),
    answer_tokens=Spread(230, 1.2, 8000),
    tools=tools(),
    max_tokens=131_072,
    page_tokens=2048,
)
CODING = Agents()
FAMILIES: dict[str, dict[str, Agents]] = {
    "engine": {f"{room} of 64": replace(ALL_RUN, running=room) for room in (8, 16, 32)},
    "one_shell": {"16 of 64": replace(ALL_RUN, running=16, tools=tools(shell="shell"))},
    "all_run": {"64 of 64": ALL_RUN},
    "independent": {
        "coding": CODING,
        "fresh": replace(CODING, max_staleness=4),
        "tests": replace(CODING, tools=(Tool("tool", Spread(30, 0.5), Spread(400, 1.0, 8000)),)),
        "search": replace(
            CODING,
            batch=64,
            num_versions=6,
            turns=Spread(8, 0.5, 30),
            tools=(Tool("tool", Spread(1, 0.5), Spread(1500, 0.7, 8000)),),
        ),
    },
}
BOUNDED = ("all_run", "independent")
CAPACITIES = (0.25, 0.5, 0.75, 1.0, 1.5)
SEEDS = {"engine": 3, "one_shell": 2, "all_run": 2, "independent": 2}
POLICIES = ("lru", "arc", "untold", "version", "belady")

Rates = dict[str, float]
Figures = dict[str, tuple[float, str, str]]


def figures(*, seeds: Mapping[str, int] = SEEDS) -> Figures:
    """Medians over fleets, capacities and seeds, after a table."""
    answer: Figures = {}
    for family, fleets in FAMILIES.items():
        found = _family(family, fleets, seeds=seeds[family])
        everything = [rates for by_share in found.values() for rates in by_share]
        if family != "engine":
            answer |= _ratios(everything, f".{family}", bounded=family in BOUNDED)
            continue
        answer |= _ratios(everything)
        for share, rates in found.items():
            answer |= _ratios(rates, f".capacity_{share:.0%}".rstrip("%"))
        for figure, ours, theirs in (
            ("hit_ratio_vs_lru.untold", "untold", "lru"),
            ("prefix_hit_ratio_vs_lru", "version prefix", "lru prefix"),
        ):
            ratio = median(one[ours] / one[theirs] for one in everything)
            answer[f"kvoffload.evict.{figure}"] = ratio, "ratio", "LRU"
    return answer


def _family(family: str, fleets: Mapping[str, Agents], *, seeds: int) -> dict[float, list[Rates]]:
    head = ("rollouts", "capacity", *POLICIES, "/lru", "/arc", "/belady", "prefix")
    print(f"\n{family}: hit rates, medians of seeds; prefix: its share of the hits of version")
    print("".join(f"{name:>10}" for name in head) + f"{'bound':>10}" * (family in BOUNDED))
    found: dict[float, list[Rates]] = {share: [] for share in CAPACITIES}
    jobs = [(name, share, seed) for name in fleets for share in CAPACITIES for seed in range(seeds)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        work = partial(_rates, fleets, bounded=family in BOUNDED)
        rates = dict(zip(jobs, pool.map(work, jobs), strict=True))
    for name in fleets:
        for share in CAPACITIES:
            rows = [rates[name, share, seed] for seed in range(seeds)]
            print(_row(name, share, rows), flush=True)
            found[share] += rows
    return found


def _rates(fleets: Mapping[str, Agents], job: tuple[str, float, int], *, bounded: bool) -> Rates:
    name, share, seed = job
    agents = fleets[name]
    trace = simulate(agents, seed=seed)
    pages = max(1, round(share * trace.working_pages))
    ours, untold = VersionAware(agents.max_staleness), trace.without_waits()
    played = {
        "lru": play(untold, evict=lru, capacity_pages=pages),
        "arc": play(untold, evict=arc, capacity_pages=pages),
        "untold": play(untold, evict=ours, capacity_pages=pages),
        "version": play(trace, evict=ours, capacity_pages=pages),
        "belady": belady(untold, capacity_pages=pages),
    }
    rates = {name: outcome.hit_rate for name, outcome in played.items()}
    for name in ("lru", "version"):
        rates[f"{name} prefix"] = played[name].prefix_hits / played[name].asked
    if bounded:
        rates["bound"] = min(rates["belady"], bound(trace, capacity_pages=pages))
    return rates


def _over(rates: Sequence[Rates], other: str) -> float:
    return median(one["version"] / one[other] for one in rates)


def _ratios(rates: Sequence[Rates], tail: str = "", *, bounded: bool = False) -> Figures:
    names = {
        "hit_ratio_vs_lru": "lru",
        "hit_ratio_vs_arc": "arc",
        "fraction_of_belady": "belady",
    } | ({"fraction_of_bound": "bound"} if bounded else {})
    return {
        f"kvoffload.evict.{figure}{tail}": (_over(rates, other), "ratio", other)
        for figure, other in names.items()
    }


def _row(name: str, share: float, rates: Sequence[Rates]) -> str:
    values = [median(one[policy] for one in rates) for policy in POLICIES]
    values += [_over(rates, other) for other in ("lru", "arc", "belady")]
    values += [median(one["version prefix"] / one["version"] for one in rates)]
    values += [median(one["bound"] for one in rates)] if "bound" in rates[0] else []
    return f"{name:>10}{share:>10}" + "".join(f"{value:>10.3f}" for value in values)
