"""Simulated fleets of agents, and the traces that they leave. Seeded, pure."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from statistics import median

from primeblocks.errors import PlanError
from primeblocks.kvoffload import PageKey

from .eviction_traces import Advance, End, Event, Trace, Use, Wait

__all__ = ["Agents", "Spread", "Tool", "simulate"]


@dataclass(frozen=True)
class Spread:
    """A log-normal quantity: half of all draws are below `median`.

    Args:
        sigma: standard deviation of the logarithm; 0 for a constant.
        most: larger draws count as this.
    """

    median: float
    sigma: float
    most: float = math.inf

    def draw(self, random: Random) -> float:
        return min(self.median * math.exp(self.sigma * random.gauss(0.0, 1.0)), self.most)


@dataclass(frozen=True)
class Tool:
    """A tool that a rollout may call after a turn.

    Args:
        what: the name that a tier is told.
        seconds: time that a call takes.
        tokens: length of its answer.
        share: weight among all calls, relative to the sum over all tools.
    """

    what: str
    seconds: Spread
    tokens: Spread
    share: float = 1.0


@dataclass(frozen=True)
class Agents:
    """Rollouts with tools: multi-turn, growing, in groups of one prompt, under a moving policy.

    The defaults are coding agents on an engine that has room for all of them. A group keeps the
    salt of the version that it began with, and is dropped and started again when it is too old.

    Args:
        concurrent: rollouts in flight; one that ends makes room for the next.
        running: rollouts that the engine has room for at once; the others queue for it, first come,
            first served, turn by turn. None means all.
        samples: rollouts of one prompt; they share its pages.
        groups: prompts whose samples begin in turn; with 1, those of one prompt begin in a row.
        partial: a rollout goes on with the newest version in each turn, and computes its context
            again; otherwise it keeps the one that its group began with, or is dropped.
        batch: rollouts that the trainer waits for before it makes the next version.
        step_s: least seconds between two versions.
        max_staleness: versions that a group may be behind.
        num_versions: number of versions to play.
        system_tokens: tokens in front of every prompt.
        prompt_tokens: tokens after them, by prompt.
        turns: turns of one rollout.
        answer_tokens: tokens that the model writes in one turn.
        tools: one is called after each turn but the last.
        token_s: seconds to write one token.
        max_tokens: length at which a rollout ends.
        page_tokens: tokens of one page.

    Raises:
        PlanError: a count that is not positive, or no tools.
    """

    concurrent: int = 64
    running: int | None = None
    samples: int = 8
    groups: int = 1
    partial: bool = False
    batch: int = 16
    step_s: float = 30.0
    max_staleness: int = 8
    num_versions: int = 16
    system_tokens: int = 2048
    prompt_tokens: Spread = field(default=Spread(2000, 0.8, 16000))
    turns: Spread = field(default=Spread(15, 0.6, 60))
    answer_tokens: Spread = field(default=Spread(200, 0.8, 4000))
    tools: tuple[Tool, ...] = (Tool("tool", Spread(3, 1.5, 300), Spread(400, 1.0, 8000)),)
    token_s: float = 1 / 40
    max_tokens: int = 32768
    page_tokens: int = 512

    def __post_init__(self) -> None:
        for name in (
            "concurrent",
            "samples",
            "groups",
            "batch",
            "num_versions",
            "max_tokens",
            "page_tokens",
        ):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.running is not None and self.running < 1:
            raise PlanError(f"running must be at least 1, or None; got {self.running}")
        if self.max_staleness < 0:
            raise PlanError(f"max_staleness counts versions; got {self.max_staleness}")
        if not self.tools:
            raise PlanError("agents call a tool after each turn; got no tools")


def simulate(agents: Agents, *, seed: int) -> Trace:
    """Play the agents until the last version. Pure: equal arguments, equal traces."""
    return _Play(agents, Random(seed)).run()


@dataclass(eq=False)
class _Group:
    number: int
    version: int
    prompt_tokens: int
    begun: int = 0


@dataclass(eq=False)
class _Rollout:
    number: int
    group: _Group
    turns: int
    tokens: int
    version: int
    pages: list[PageKey] = field(default_factory=list)
    writing: bool = False
    over: bool = False


class _Play:
    def __init__(self, agents: Agents, random: Random) -> None:
        self.agents, self.random = agents, random
        self.version, self.now, self.stepped = 0, 0.0, 0.0
        self.events: list[Event] = []
        self.live: dict[int, _Rollout] = {}
        self.finished = 0
        self.dropped = 0
        self.begun = 0
        self.prompts = 0
        self.groups: deque[_Group] = deque()
        self.again: deque[int] = deque()  # prompt lengths of dropped groups
        self.known: set[PageKey] = set()
        self.users: Counter[PageKey] = Counter()
        self.working: list[int] = []
        self.scheduled = 0
        self.schedule: list[tuple[float, int, _Rollout]] = []
        self.room = agents.concurrent if agents.running is None else agents.running
        self.queue: deque[_Rollout] = deque()

    def run(self) -> Trace:
        for _ in range(self.agents.concurrent):
            self.begin()
        while self.version < self.agents.num_versions:
            self.now, _, rollout = heapq.heappop(self.schedule)
            if rollout.over:
                continue
            if rollout.writing:
                self.answer(rollout)
            elif self.room:
                self.ask(rollout)
            else:
                self.events.append(Wait(rollout.number, "queue"))
                self.queue.append(rollout)
            self.advance()
            self.serve()
        working = int(median(self.working)) if self.working else 0
        return Trace(tuple(self.events), working, self.begun, self.dropped)

    def begin(self) -> None:
        """Begin the next sample of the group whose turn it is, or of a new one."""
        agents = self.agents
        oldest = 0 if agents.partial else self.version - agents.max_staleness
        self.groups = deque(
            one for one in self.groups if one.begun < agents.samples and one.version >= oldest
        )
        if len(self.groups) < agents.groups:
            self.groups.appendleft(self.next_group())
        group = self.groups.popleft()
        self.groups.append(group)
        group.begun += 1
        turns = max(1, round(self.agents.turns.draw(self.random)))
        tokens = self.agents.system_tokens + group.prompt_tokens
        rollout = _Rollout(self.begun, group, turns, tokens, group.version)
        self.begun += 1
        self.live[rollout.number] = rollout
        self.later(rollout, 0.0)

    def next_group(self) -> _Group:
        self.prompts += 1
        drawn = self.again.popleft() if self.again else self.agents.prompt_tokens.draw(self.random)
        return _Group(self.prompts, self.version, int(drawn))

    def later(self, rollout: _Rollout, seconds: float) -> None:
        self.scheduled += 1  # keeps equal times in order; rollouts are never compared
        heapq.heappush(self.schedule, (self.now + seconds, self.scheduled, rollout))

    def ask(self, rollout: _Rollout) -> None:
        """Begin a turn: all pages so far are read or computed, then the model writes."""
        if self.agents.partial and rollout.version < self.version:
            self.forget(rollout)
            rollout.version = self.version
        self.grow(rollout)
        asked = sum(page in self.known for page in rollout.pages)
        self.events.append(Use(rollout.number, tuple(rollout.pages), asked))
        self.known.update(rollout.pages)
        self.working.append(len(self.users))
        tokens = max(1, round(self.agents.answer_tokens.draw(self.random)))
        rollout.tokens += tokens
        rollout.writing = True
        self.room -= 1
        self.later(rollout, tokens * self.agents.token_s)

    def answer(self, rollout: _Rollout) -> None:
        """End a turn: its pages are saved, then a tool runs, or the rollout is done."""
        before = len(rollout.pages)
        self.grow(rollout)
        if len(rollout.pages) > before:
            self.events.append(Use(rollout.number, tuple(rollout.pages[before:]), 0))
            self.known.update(rollout.pages[before:])
        rollout.turns -= 1
        tool = self.call()
        rollout.tokens += max(1, round(tool.tokens.draw(self.random)))
        if rollout.turns == 0 or rollout.tokens >= self.agents.max_tokens:
            self.end(rollout)
            self.finished += 1
            self.begin()
        else:
            self.events.append(Wait(rollout.number, tool.what))
            self.later(rollout, tool.seconds.draw(self.random))
            rollout.writing = False
            self.room += 1

    def call(self) -> Tool:
        tools = self.agents.tools
        if len(tools) == 1:
            return tools[0]
        return self.random.choices(tools, [tool.share for tool in tools])[0]

    def serve(self) -> None:
        """Let queued rollouts go on in order of arrival, as far as there is room."""
        while self.queue and self.room:
            rollout = self.queue.popleft()
            if not rollout.over:
                self.ask(rollout)

    def end(self, rollout: _Rollout) -> None:
        self.events.append(End(rollout.number))
        rollout.over = True
        self.room += rollout.writing
        del self.live[rollout.number]
        self.forget(rollout)

    def forget(self, rollout: _Rollout) -> None:
        self.users.subtract(rollout.pages)
        for page in rollout.pages:
            if not self.users[page]:
                del self.users[page]
        rollout.pages = []

    def advance(self) -> None:
        """Make the next version if batch and trainer are ready; end groups that are too old."""
        agents = self.agents
        if self.finished < agents.batch or self.now < self.stepped + agents.step_s:
            return
        self.finished -= agents.batch
        self.stepped = self.now
        self.version += 1
        self.events.append(Advance(self.version))
        old = (
            []
            if agents.partial
            else [
                rollout
                for rollout in self.live.values()
                if self.version - rollout.group.version > agents.max_staleness
            ]
        )
        for group in dict.fromkeys(rollout.group for rollout in old):
            self.again.append(group.prompt_tokens)
            group.begun = agents.samples
        for rollout in old:
            self.end(rollout)
            self.dropped += 1
            self.begin()

    def grow(self, rollout: _Rollout) -> None:
        """Name the pages that have become full."""
        agents, group = self.agents, rollout.group
        shared = (agents.system_tokens + group.prompt_tokens - 1) // agents.page_tokens
        system = agents.system_tokens // agents.page_tokens
        for at in range(len(rollout.pages), rollout.tokens // agents.page_tokens):
            owner = (
                "s" if at < system else f"p{group.number}" if at < shared else f"r{rollout.number}"
            )
            key = PageKey(str(rollout.version), f"{owner}/{at}".encode(), version=rollout.version)
            rollout.pages.append(key)
            self.users[key] += 1
