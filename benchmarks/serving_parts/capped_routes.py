"""Captured routes that vLLM 0.33 keeps, and the pages of a tier that count as hits because of it.

0.33 keeps routes by the hash of a page, apart from the page: those of pages that a finished
request left in the engine's memory, up to twice as many as that memory has, the longest unused
leave first (`distributed/aux_output_connector/connector.py`, lines 77, 138 to 174 and 216 to 225
of the wheel). `v1/core/sched/scheduler.py`, lines 1189 to 1197, then takes no page from a tier at
all if the routes of one page of the prompt are gone. `RouteCap` is that rule. Beside it: routes
that lie with their pages, as `kvoffload` moves them, where every page of a tier counts.

Bookkeeping of pages, no clock: coding agents take turns on one engine, so that between two turns
of one the others fill its memory. No request waits or is preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.serving_parts.simulator import Session

from .sessions import recorded

__all__ = ["RouteCap", "figures", "play"]

Page = Hashable
Figures = dict[str, tuple[float, str, str]]

SEEDS = (0, 1)
SESSIONS, AT_A_TIME, PAGE_TOKENS = 48, 24, 1024
TIERS = (1, 2, 4, 8)  # pages of the tier over those of the engine
# Of the pages that 24 agents need between two turns, the part that the engine's memory holds.
SHARES = (0.5, 0.25)


class RouteCap:
    """Pages whose routes vLLM 0.33 has.

    Args:
        pages: of the engine's memory.
        is_there: whether the engine's memory has a page now; its routes are then there too.
        room: pages with routes that are kept, over `pages`.
    """

    def __init__(self, pages: int, is_there: Callable[[Page], bool], *, room: int = 2) -> None:
        self._most, self._is_there = pages * room, is_there
        self._kept: OrderedDict[Page, None] = OrderedDict()

    def lead(self, prompt: Sequence[Page]) -> int:
        """Return the lead pages of a prompt that have routes; asking is a use of them."""
        for count, page in enumerate(prompt):
            if page in self._kept:
                self._kept.move_to_end(page)
            elif not self._is_there(page):
                return count
        return len(prompt)

    def allowed(self, prompt: Sequence[Page], local: int, external: int) -> int:
        """Return the pages that may come from a tier, of `external` behind `local`: all or none."""
        return external if local + external <= self.lead(prompt) else 0

    def finish(self, pages: Iterable[Page]) -> None:
        """Note a request that is over, and its pages."""
        for page in pages:
            if page not in self._kept and self._is_there(page):
                self._kept[page] = None
        excess = len(self._kept) - self._most
        gone = [page for page in self._kept if not self._is_there(page)][: max(0, excess)]
        for page in gone:
            del self._kept[page]


class _Cache:
    """Pages in the order of their last use."""

    def __init__(self, pages: int) -> None:
        self._most, self._pages = pages, OrderedDict[Page, None]()

    def __contains__(self, page: Page) -> bool:
        return page in self._pages

    def use(self, pages: Sequence[Page]) -> None:
        for page in reversed(pages):  # of a prompt the last page leaves first
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)


@dataclass(frozen=True)
class Hits:
    """Prompt tokens in all, found in the engine's memory, and taken from the tier."""

    prompt: int = 0
    local: int = 0
    tier: int = 0

    @property
    def rate(self) -> float:
        return (self.local + self.tier) / self.prompt

    def __add__(self, more: Hits) -> Hits:
        return Hits(self.prompt + more.prompt, self.local + more.local, self.tier + more.tier)


def play(agents: Sequence[Session], *, at_a_time: int, pages: int, tier: int, capped: bool) -> Hits:
    """Let agents take turns on an engine of `pages` with a tier of `tier` pages. Pure."""
    memory, below = _Cache(pages), _Cache(tier)
    cap = RouteCap(pages, memory.__contains__) if capped else None
    waiting, running, hits = list(agents[::-1]), list[tuple[Session, int]](), Hits()
    while waiting or running:
        while waiting and len(running) < at_a_time:
            running.append((waiting.pop(), 0))
        for agent, turn in running:
            hits += _request(*_pages(agent, turn), memory, below, cap)
        running = [(agent, turn + 1) for agent, turn in running if turn + 1 < len(agent.turns)]
    return hits


def _pages(agent: Session, turn: int) -> tuple[list[Page], list[Page]]:
    """Return the whole pages of a turn's prompt, and those with its answer."""
    before = sum(each.prompt_tokens + each.answer_tokens for each in agent.turns[:turn])
    prompt = agent.shared_tokens + before + agent.turns[turn].prompt_tokens
    whole = prompt + agent.turns[turn].answer_tokens
    shared = agent.shared_tokens // PAGE_TOKENS
    names = [(agent.name if page >= shared else "", page) for page in range(whole // PAGE_TOKENS)]
    return names[: prompt // PAGE_TOKENS], names


def _request(
    prompt: Sequence[Page],
    whole: Sequence[Page],
    memory: _Cache,
    below: _Cache,
    cap: RouteCap | None,
) -> Hits:
    asked = prompt[:-1]  # one token at least is computed
    local = len(list(takewhile(memory.__contains__, asked)))
    external = len(list(takewhile(below.__contains__, asked[local:])))
    if cap is not None:
        external = cap.allowed(asked, local, external)
    memory.use(whole)
    below.use(whole)
    if cap is not None:
        cap.finish(whole)
    return Hits(len(prompt) * PAGE_TOKENS, local * PAGE_TOKENS, external * PAGE_TOKENS)


def needed(agents: Sequence[Session], at_a_time: int) -> int:
    """Return the pages of so many agents at half of their turns, on average."""
    halves = [len(_pages(agent, len(agent.turns) // 2)[1]) for agent in agents]
    return at_a_time * sum(halves) // len(halves)


def figures(*, seeds: Sequence[int] = SEEDS, sessions: int = SESSIONS) -> Figures:
    """Hit rates by share of the agents that the memory holds, and by size of the tier."""
    found: Figures = {}
    for share in SHARES:
        for times in TIERS:
            ours, vllm = Hits(), Hits()
            for seed in seeds:
                agents = recorded(sessions, seed=seed)
                pages = int(needed(agents, AT_A_TIME) * share)
                how = {"at_a_time": AT_A_TIME, "pages": pages, "tier": pages * times}
                ours += play(agents, **how, capped=False)
                vllm += play(agents, **how, capped=True)
            name = f"serving.capped_routes.memory_{share:g}.tier_{times}"
            found[f"{name}.hit_rate_ours"] = (ours.rate, "ratio", "")
            found[f"{name}.hit_rate_vllm"] = (vllm.rate, "ratio", "")
            found[f"{name}.hit_ratio_ours_over_vllm"] = (
                ours.rate / vllm.rate,
                "ratio",
                "vllm 0.33",
            )
    name = "hit_ratio_ours_over_vllm"
    # A quarter of what the agents need, and a tier of four times that: most of it.
    found[f"serving.capped_routes.{name}"] = found[
        f"serving.capped_routes.memory_0.25.tier_4.{name}"
    ]
    return found
