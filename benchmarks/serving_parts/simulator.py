"""A fleet of engines with prefix caches in virtual time, to compare routes."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import attrgetter

import numpy as np

from primeblocks.errors import UsageError
from primeblocks.planning import EngineModel
from primeblocks.planning.engine import SimulatedEngine
from primeblocks.planning.virtual import run_in_virtual_time
from primeblocks.serving import Fleet, Request, Route

Pages = tuple[Hashable, ...]

__all__ = ["AgentTurn", "Served", "Serving", "ServingModel", "Session", "simulate_serving"]


@dataclass(frozen=True)
class ServingModel:
    """One engine. It computes one prompt at a time, and decodes nothing meanwhile.

    Args:
        decode: its throughput, and the number of requests that run at a time.
        prefill_tokens_per_s: tokens of a prompt that it computes per second.
        cache_pages: pages of its KV cache, for running requests and for earlier ones.
        page_tokens: tokens of a page.

    Raises:
        UsageError: a number is not positive.
    """

    decode: EngineModel
    prefill_tokens_per_s: float
    cache_pages: int
    page_tokens: int = 16

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0 or min(self.cache_pages, self.page_tokens) < 1:
            raise UsageError(
                "prefill_tokens_per_s, cache_pages and page_tokens must be positive; got "
                f"{self.prefill_tokens_per_s}, {self.cache_pages} and {self.page_tokens}."
            )


@dataclass(frozen=True)
class AgentTurn:
    """One answer of an agent.

    Args:
        prompt_tokens: new tokens before the answer: the task, or a tool's result.
        answer_tokens: tokens of the answer.
        tool_s: seconds of the tool after the answer.
    """

    prompt_tokens: int
    answer_tokens: int
    tool_s: float = 0.0


@dataclass(frozen=True)
class Session:
    """A conversation. Each prompt is the previous prompt, its answer, and new tokens.

    Args:
        name: the name of the session.
        turns: the answers in order.
        shared: sessions with an equal `shared` have the same beginning.
        shared_tokens: tokens of that beginning.
    """

    name: str
    turns: tuple[AgentTurn, ...]
    shared: str = ""
    shared_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens at the end of the session."""
        return self.shared_tokens + sum(
            each.prompt_tokens + each.answer_tokens for each in self.turns
        )


@dataclass(frozen=True, slots=True)
class Served:
    """One served request: `wait_s` is the time to its first token, `end_s` its end on the clock."""

    engine: str
    session: str
    prompt_tokens: int
    hit_tokens: int
    wait_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Serving:
    """The result of `simulate_serving`.

    Args:
        requests: in the order in which they ended.
        busy_s: seconds with at least one request to decode, by engine.
    """

    requests: tuple[Served, ...]
    busy_s: Mapping[str, float]

    def __repr__(self) -> str:
        return f"<Serving of {len(self.requests)} requests: {self.total_s:.5g} s>"

    @property
    def total_s(self) -> float:
        """Seconds until the last request ended."""
        return self.requests[-1].end_s

    @property
    def hit_rate(self) -> float:
        """Tokens of prompts that a cache held, over all tokens of prompts."""
        return self.hits(0.0, np.inf)

    @property
    def wait_s(self) -> float:
        """Mean seconds to a first token."""
        return float(np.mean([request.wait_s for request in self.requests]))

    def hits(self, begin_s: float, end_s: float) -> float:
        """Return the hit rate of requests that ended in a span, or NaN if the span has none."""
        found = [each for each in self.requests if begin_s <= each.end_s < end_s]
        tokens = sum(each.prompt_tokens for each in found)
        return sum(each.hit_tokens for each in found) / tokens if tokens else float("nan")


def simulate_serving(
    sessions: Sequence[Session],
    engines: Mapping[str, ServingModel],
    *,
    route: Route,
    in_flight: int,
    update_s: float = float("inf"),
) -> Serving:
    """Serve sessions through a `Fleet` in virtual time, `in_flight` at a time, in order. Pure.

    Args:
        sessions: the conversations.
        engines: the engines by name.
        route: the rule that chooses an engine for each request.
        in_flight: sessions at a time.
        update_s: seconds between two policy versions. Each version has its own salt, so a request
            that begins after an update cannot use earlier pages.

    Raises:
        UsageError: there are 0 sessions, engines differ in page size, or a number is out of range.
        UsageError: a prompt and its answer do not fit an engine's cache.
    """
    pages = {model.page_tokens for model in engines.values()}
    if not sessions or len(pages) != 1 or in_flight < 1 or not update_s > 0:
        raise UsageError(
            f"needs a session, engines of one page size, in_flight >= 1 and update_s > 0; got "
            f"{len(sessions)} sessions, page_tokens {sorted(pages)}, {in_flight}, {update_s}."
        )
    room = min(model.cache_pages * model.page_tokens for model in engines.values())
    if (longest := max(sessions, key=attrgetter("tokens"))).tokens > room:
        raise UsageError(
            f"session {longest.name!r} has {longest.tokens} tokens in the end, and a cache has "
            f"room for {room}. Shorten the session, or raise cache_pages."
        )
    return run_in_virtual_time(_serve(sessions, engines, route, in_flight, update_s, *pages))


async def _serve(
    sessions: Sequence[Session],
    models: Mapping[str, ServingModel],
    route: Route,
    in_flight: int,
    update_s: float,
    page_tokens: int,
) -> Serving:
    clock = asyncio.get_running_loop()
    engines = {name: _Engine(model) for name, model in models.items()}
    served: list[Served] = []

    async def call(name: str, session: Session, names: _Names, prompt: int, answer: int) -> None:
        start = clock.time()
        hit, first_s = await engines[name].serve(names, prompt, answer)
        served.append(Served(name, session.name, prompt, hit, first_s - start, clock.time()))

    def describe(session: Session, names: _Names, prompt: int, answer: int) -> Request:
        return Request(session.name, names.of(prompt))

    fleet = Fleet(
        {name: partial(call, name) for name in models},
        route=route,
        describe=describe,
        max_in_flight={name: model.decode.max_running for name, model in models.items()},
        cache_pages=max(model.cache_pages for model in models.values()),
    )
    waiting = deque(sessions)

    async def agents() -> None:
        while waiting:
            session = waiting.popleft()
            tokens = session.shared_tokens
            for turn in session.turns:
                tokens += turn.prompt_tokens
                names = _Names(session, page_tokens, int(clock.time() / update_s))
                await fleet(session, names, tokens, turn.answer_tokens)
                tokens += turn.answer_tokens
                await asyncio.sleep(turn.tool_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(in_flight, len(sessions))):
            group.create_task(agents())
    return Serving(tuple(served), {name: each.decode.busy_s for name, each in engines.items()})


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a session's pages under one policy version."""

    session: Session
    page_tokens: int
    version: int

    def of(self, tokens: int) -> Pages:
        shared = self.session.shared_tokens // self.page_tokens
        own = [self.session.shared] * shared + [self.session.name] * (tokens // self.page_tokens)
        return tuple((self.version, own[i], i) for i in range(tokens // self.page_tokens))


class _Engine:
    """A KV cache in front of a `SimulatedEngine`. Requests enter in the order of arrival."""

    def __init__(self, model: ServingModel) -> None:
        self.decode = SimulatedEngine(model.decode)
        self._model = model
        self._used = Counter[Hashable]()  # pages that running requests found here
        self._free: OrderedDict[Hashable, None] = OrderedDict()  # the first leaves next
        self._running = self._computed = 0  # requests, and the pages that they compute
        self._queue: deque[tuple[asyncio.Future[Pages], Pages, int]] = deque()
        self._prefill = asyncio.Lock()

    async def serve(self, names: _Names, prompt: int, answer: int) -> tuple[int, float]:
        """Return the tokens that the cache held, and the time of the first token."""
        size, clock = self._model.page_tokens, asyncio.get_running_loop()
        need = -(-(prompt + answer) // size)
        turn: asyncio.Future[Pages] = clock.create_future()
        self._queue.append((turn, names.of(prompt), need))
        self._admit()
        lead = await turn
        missing = max(1, prompt - len(lead) * size)  # the last token is computed again
        async with self._prefill:
            self.decode.pause()
            await asyncio.sleep(missing / self._model.prefill_tokens_per_s)
            self.decode.resume()
        first_s = clock.time()
        await self.decode.generate(answer)
        self._leave(lead, names.of(prompt + answer), need)
        return prompt - missing, first_s

    def _admit(self) -> None:
        most = self._model.cache_pages
        while self._queue and self._running < self._model.decode.max_running:
            turn, pages, need = self._queue[0]
            lead = tuple(takewhile(lambda page: page in self._used or page in self._free, pages))
            used = len(self._used) + sum(page not in self._used for page in lead)
            computed = self._computed + need - len(lead)
            if used + computed > most:
                return
            self._queue.popleft()
            self._running, self._computed = self._running + 1, computed
            for page in lead:
                self._free.pop(page, None)
                self._used[page] += 1
            while used + computed + len(self._free) > most:
                self._free.popitem(last=False)
            turn.set_result(lead)

    def _leave(self, lead: Pages, pages: Pages, need: int) -> None:
        self._running, self._computed = self._running - 1, self._computed - (need - len(lead))
        for page in lead:
            self._used[page] -= 1
            if not self._used[page]:
                del self._used[page]
        for page in reversed(pages):  # the last page leaves before those in front of it
            if page not in self._used:
                self._free[page] = None
                self._free.move_to_end(page)
        self._admit()
