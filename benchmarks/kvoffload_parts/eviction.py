"""Pages of rollouts that a tier behind an engine's own prefix cache still has, by policy.

Deterministic, and simulated but for one family; no clock is read. `eviction_engine` has the model
of the engine, which asks the tier only for what its own cache lost. A hit is a page that was asked
for and that the engine can use: it and all pages between it and the engine's own were there. A
capacity is a share of the pages of the rollouts in flight, the median over all requests; `engine`
is the share that the engine's own cache holds. Simulated are 64 rollouts in flight, 40 tokens a
second; medians of lengths and times, with the standard deviation of the logarithm in brackets.
Eight families:

- `queue`: coding agents on an engine that runs 8, 16 or 32 of the 64 and holds as much; the others
  wait for a tool, or in the engine's queue, turn by turn. 12288 system tokens, 1500 of the prompt
  (0.8), 30 turns (0.5), answers of 230 tokens (1.2) and of tools of 600 (1.4), contexts that end at
  131072 tokens: like the trials of SWE-bench Pro in Inferact/codex_swebenchpro_traces. Tools by
  shares and times of 430,000 calls (Zhu et al., TraceLab, arXiv:2606.30560). The shell is four
  kinds of commands, as Continuum (Li et al., arXiv:2511.02230) tells tools apart by a command's
  first word; that split is ours, such that TraceLab's numbers come out. `shell`: one name for all
  four, 16 running.
- `no_queue`: the same where the engine runs all 64 and holds `half` or `most` (three quarters) of
  their pages; `shell`: most, one name; and shorter agents with one tool and an engine that holds
  half: `coding` (3 s, 1.5), `tests` (30 s, 0.5), `search` (1 s, 0.5).
- `samples`: one turn, 16 samples of each of 64 prompts, begun in turn, so that an engine that is
  short of memory has lost a prompt when the next sample begins.
- `few_prompts`: the same, of 16, 24 or 32 prompts in turn.
- `chat`: people answer after a minute (1.0) and leave after 6 turns (0.6), without a word.
- `partial`: rollouts go on with new weights and compute their context again; a version for every 8
  finished ones. `max_staleness` is 0.
- `dropped`: `coding` where groups that are two versions old are dropped and begun again, over 12
  versions; `unsaid`: nobody says that a rollout has ended.
- `recorded`: 24 agents with real tools on a real vLLM (`record`) that runs 4 of them, or all;
  behind the model of a cache of about the size that it had, or half as large (`less`).

The policies of the package are told who waits for what, who runs, the queue, and, except in `chat`
and `unsaid`, who has ended. Belady knows which page is asked for when. Seeds start at 0; the policy
was chosen on seed 101.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import median

from primeblocks.kvoffload.evict import (
    Choice,
    RolloutAware,
    Snapshot,
    VersionAware,
    by_schedule,
    ended,
    facts_of,
    lru,
)

from .eviction_engine import Behind, Ours, Queue, Resume, behind, play
from .eviction_fleets import Agents, Spread, Tool, simulate
from .eviction_policies import Arc, Belady, LfuDa, Lru, S3Fifo, Sieve
from .eviction_traces import End, Wait, recorded

__all__ = ["FAMILIES", "Fleet", "figures", "hits"]

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


@dataclass(frozen=True)
class Fleet:
    """Agents, and the engine in front of the tier.

    Args:
        agents: simulated ones, or the name of a recorded run.
        engine: share of their pages that the engine's own cache holds.
        says_ends: whether the tier is told that a rollout has ended.
        max_staleness: that of the policies which look at versions.
        capacities: of tiers, as shares of the pages of the rollouts in flight.
    """

    agents: Agents | str
    engine: float
    says_ends: bool = True
    max_staleness: int = 8
    capacities: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0, 1.5)


AGENTS = Agents(
    step_s=60,
    num_versions=4,
    system_tokens=12_288,
    prompt_tokens=Spread(1500, 0.8, 8000),
    turns=Spread(30, 0.5, 100),
    answer_tokens=Spread(230, 1.2, 8000),
    tools=tools(),
    max_tokens=131_072,
    page_tokens=2048,
)
SHORT = Agents(num_versions=8)
DROPPED = replace(SHORT, max_staleness=2, num_versions=12)
SEARCH = Tool("tool", Spread(1, 0.5), Spread(1500, 0.7, 8000))
SAMPLES = replace(
    SHORT,
    samples=16,
    groups=64,
    batch=64,
    prompt_tokens=Spread(6000, 0.8, 16_000),
    turns=Spread(1, 0),
    answer_tokens=Spread(3000, 1.0, 16_000),
)
CHAT = replace(
    SHORT,
    samples=1,
    batch=64,
    max_staleness=100,
    prompt_tokens=Spread(300, 0.8, 4000),
    turns=Spread(6, 0.6, 40),
    answer_tokens=Spread(300, 0.8, 4000),
    tools=(Tool("person", Spread(60, 1.0, 1800), Spread(100, 1.0, 4000)),),
)


def _few(prompts: int, engine: float, **how: object) -> Fleet:
    agents = replace(SAMPLES, groups=prompts, **how)
    return Fleet(agents, engine, capacities=(0.5, 0.75, 1.0, 1.5, 2.0, 3.0))


def _queue(running: int, **how: object) -> Fleet:
    return Fleet(replace(AGENTS, running=running, **how), running / AGENTS.concurrent)


FAMILIES: dict[str, dict[str, Fleet]] = {
    "queue": {f"{room} of 64": _queue(room) for room in (8, 16, 32)}
    | {"shell": _queue(16, tools=tools(shell="shell"))},
    "no_queue": {
        "half": Fleet(AGENTS, 0.5),
        "most": Fleet(AGENTS, 0.75),
        "shell": Fleet(replace(AGENTS, tools=tools(shell="shell")), 0.75),
        "coding": Fleet(SHORT, 0.5),
        "tests": Fleet(replace(SHORT, tools=(Tool("tool", Spread(30, 0.5), ANSWERS),)), 0.5),
        "search": Fleet(replace(SHORT, batch=64, turns=Spread(8, 0.5, 30), tools=(SEARCH,)), 0.5),
    },
    "samples": {
        "half": Fleet(SAMPLES, 0.5),
        "16 of 64": Fleet(replace(SAMPLES, running=16), 0.25),
    },
    "few_prompts": {f"{n}, half": _few(n, 0.5) for n in (16, 24, 32)}
    | {f"{n}, 16 of 64": _few(n, 0.25, running=16) for n in (16, 24, 32)},
    "chat": {
        "quarter": Fleet(CHAT, 0.25, says_ends=False),
        "half": Fleet(CHAT, 0.5, says_ends=False),
    },
    "partial": {
        "half": Fleet(replace(AGENTS, batch=8, partial=True), 0.5, max_staleness=0),
        "16 of 64": Fleet(
            replace(AGENTS, batch=8, partial=True, running=16), 0.25, max_staleness=0
        ),
    },
    "dropped": {
        "said": Fleet(DROPPED, 0.5, max_staleness=2),
        "unsaid": Fleet(DROPPED, 0.5, max_staleness=2, says_ends=False),
    },
    "recorded": {
        "4 of 24": Fleet("queue", 0.55),
        "4, less": Fleet("queue", 0.25),
        "all 24": Fleet("no_queue", 0.5),
        "all, less": Fleet("no_queue", 0.25),
    },
}
SEEDS = 2
FLOOR = 0.97
PEERS = {"lru": Lru, "sieve": Sieve, "s3-fifo": S3Fifo, "lfu-da": LfuDa, "arc": Arc}
POLICIES = (*PEERS, "belady", "versions", "schedule", "no versions", "ours")

Hits = dict[str, int]
Figures = dict[str, tuple[float, str, str]]
_FIGURE = "kvoffload.evict.behind_engine_cache"


@dataclass(frozen=True)
class BySchedule:
    """The scheduler's state without the means of the waits."""

    facts = facts_of(ended, by_schedule)

    def __call__(self, snapshot: Snapshot) -> Choice:
        return ended(snapshot) or by_schedule(snapshot) or lru(snapshot)


def figures(*, seeds: int = SEEDS, families: Iterable[str] = FAMILIES) -> Figures:
    """Medians over fleets, capacities and seeds, after a table.

    Raises:
        AssertionError: on some fleet, tier and seed `RolloutAware` has too few of LRU's hits.
    """
    ratios: dict[str, float] = {}
    every: list[float] = []
    head = ("fleet", "capacity", "asked", "LRU hits", *POLICIES[1:])
    print("\nbehind an engine's own cache: hits over LRU's, medians of seeds")
    for family in families:
        print(f"\n{family}\n" + "".join(f"{name:>12}" for name in head))
        found = _family(FAMILIES[family], seeds=seeds)
        for (name, share), rows in found.items():
            print(_row(name, share, rows), flush=True)
        for name in FAMILIES[family]:
            of_fleet = [one for (fleet, _), rows in found.items() if fleet == name for one in rows]
            every.append(_median(of_fleet, "ours"))
            ratios[f"{family}.{name}.hit_ratio_vs_lru"] = every[-1]
        short = [one for (_, share), rows in found.items() if share < 1 for one in rows]
        for name in POLICIES[1:]:
            ratios[f"{family}.short_of_room.{name}.hit_ratio_vs_lru"] = _median(short, name)
        worst = min(_over(one, "ours") for rows in found.values() for one in rows)
        assert worst >= FLOOR, f"{family}: a row with {worst} of LRU's hits, less than {FLOOR}"
        ratios[f"{family}.worst_row.hit_ratio_vs_lru"] = worst
        if family == "queue":
            ratios["hit_ratio_vs_lru"] = _median(short, "ours")
    ratios["hit_ratio_vs_lru.worst_fleet"] = min(every)
    named = ((name.replace(",", "").replace(" ", "_"), ratio) for name, ratio in ratios.items())
    return {f"{_FIGURE}.{name}": (ratio, "ratio", "LRU") for name, ratio in named}


def _family(fleets: Mapping[str, Fleet], *, seeds: int) -> dict[tuple[str, float], list[Hits]]:
    """Return hits by fleet and capacity, one for each seed; of a recorded run, one."""
    jobs = [
        (name, seed)
        for name, fleet in fleets.items()
        for seed in range(1 if isinstance(fleet.agents, str) else seeds)
    ]
    found: dict[tuple[str, float], list[Hits]] = {}
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        for (name, _), rows in zip(jobs, pool.map(partial(_play, fleets), jobs), strict=True):
            for share, row in rows.items():
                found.setdefault((name, share), []).append(row)
    return found


def _play(fleets: Mapping[str, Fleet], job: tuple[str, int]) -> dict[float, Hits]:
    name, seed = job
    fleet, agents = fleets[name], fleets[name].agents
    trace = recorded(agents) if isinstance(agents, str) else simulate(agents, seed=seed)
    seen = behind(trace, engine_pages=round(fleet.engine * trace.working_pages))
    tells = (Wait, Resume, Queue, End) if fleet.says_ends else (Wait, Resume, Queue)
    sizes = {share: max(1, round(share * trace.working_pages)) for share in fleet.capacities}
    how = {"tells": tells, "max_staleness": fleet.max_staleness}
    return {share: hits(seen, capacity_pages=size, **how) for share, size in sizes.items()}


def hits(seen: Behind, *, capacity_pages: int, tells: tuple[type, ...], max_staleness: int) -> Hits:
    """Return the hits of each policy, and what was `asked`."""
    ours = {
        "versions": VersionAware(max_staleness),
        "schedule": BySchedule(),
        "no versions": RolloutAware(),
        "ours": RolloutAware(max_staleness),
    }
    tiers = {name: tier(capacity_pages) for name, tier in PEERS.items()}
    tiers |= {"belady": Belady(capacity_pages, seen)}
    tiers |= {name: Ours(evict, capacity_pages, tells=tells) for name, evict in ours.items()}
    return {name: play(seen, tier).hits for name, tier in tiers.items()} | {"asked": seen.asked}


def _over(hits: Hits, name: str) -> float:
    """One page is added to both, for tiers that are too small for any hit."""
    return (hits[name] + 1) / (hits["lru"] + 1)


def _median(rows: Iterable[Hits], name: str) -> float:
    return median(_over(one, name) for one in rows)


def _row(name: str, share: float, rows: list[Hits]) -> str:
    asked, base = (round(median(one[key] for one in rows)) for key in ("asked", "lru"))
    ratios = (_median(rows, policy) for policy in POLICIES[1:])
    return f"{name:>12}{share:>12}{asked:>12}{base:>12}" + "".join(f"{r:>12.3f}" for r in ratios)
