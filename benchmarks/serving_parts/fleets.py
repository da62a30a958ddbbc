"""Fleets of engines and what their agents do, for `routes`.

In `tight` an engine has cache enough for its sessions where these are spread evenly, and not for
those of the engine that a hash gives most. In all others it has for all: `tools` wait mostly for
tools, `answers` decode long answers. Their engines slow down by a constant for each request.

`recorded` and `in_turn` are after the measurement of NVIDIA-NeMo/RL #3663: 610 recorded sessions,
no tools, 12 engines of two GPUs with a mixture of 120B parameters, 12B of them active (22 of 512
experts), prompts found at multiples of a large page, all sessions at once; or, as RL does, 144 at
a time. A decode step there reads the experts that its tokens choose, `1 - (1 - 22/512)^running` of
them, and a cache of 8 KiB a token. Chosen so that `consistent_hash` gives what was measured for it
on the first draw (939 s, 91.8 %: here 945 s, 92.0 %), and not touched for any other route: 0.7 of
two times 8 TB/s, 40,000 prompt tokens a second, pages of 5,120 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.serving_parts.simulator import AgentTurn, ServingModel, Session
from primeblocks.planning import EngineModel, decode_latency
from primeblocks.serving import (
    EngineState,
    PrefixAndLoad,
    Request,
    Route,
    consistent_hash,
    least_loaded,
    round_robin,
)

from .sessions import ANSWER, recorded

__all__ = ["FLEETS", "Shape", "cache_aware", "routes"]

PARAMETERS, ACTIVE, CHOSEN = 120e9, 12e9, 22 / 512
BYTES_PER_S, CONTEXT_BYTES = 0.7 * 2 * 8e12, 40_000 * 8192


@dataclass(frozen=True)
class Shape:
    """A fleet and what its agents do.

    Args:
        answer_tokens: median of an answer; its mean where sessions are `recorded`.
        tool_s: median seconds of a tool.
        request_s: what one more request adds to a decode step of 12 ms; 0 where it reads experts.
    """

    engines: int
    in_flight: int
    cache_tokens: int
    answer_tokens: int
    tool_s: float
    request_s: float
    sessions: int = 250
    seeds: Sequence[int] = (0, 1, 2)
    page_tokens: int = 256
    prefill_tokens_per_s: float = 12_000.0
    max_running: int = 64

    def model(self) -> ServingModel:
        if self.request_s:
            decode = decode_latency(step_s=0.012, request_s=self.request_s)
        else:
            decode = _reads_experts
        pages = self.cache_tokens // self.page_tokens
        engine = EngineModel(decode, max_running=self.max_running)
        return ServingModel(engine, self.prefill_tokens_per_s, pages, self.page_tokens)

    def tasks(self, *, seed: int) -> list[Session]:
        """Draw the sessions of the fleet's agents."""
        if self.request_s:
            return _tasks(self.sessions, self, seed=seed)
        return recorded(self.sessions, seed=seed, answer_tokens=self.answer_tokens)


def _reads_experts(running: int) -> float:
    """Tokens per second of a mixture of experts, whose decode step is bound by memory."""
    experts = (PARAMETERS - ACTIVE) / (1 - CHOSEN)
    read = PARAMETERS - experts + experts * (1 - (1 - CHOSEN) ** running)
    step_s = 0.003 + (2 * read + running * CONTEXT_BYTES) / BYTES_PER_S
    return running / step_s


FLEETS = {
    "tight": Shape(8, 72, 450_000, 250, 3.0, 0.0003),
    "tools": Shape(8, 72, 6_000_000, 250, 3.0, 0.0003),
    "answers": Shape(12, 144, 6_000_000, 500, 1.0, 0.001),
    "recorded": Shape(
        12, 610, 20_000_000, ANSWER, 0, 0, 610, range(6), 5120, 40_000.0, max_running=256
    ),
    "in_turn": Shape(
        12, 144, 20_000_000, ANSWER, 0, 0, 610, range(6), 5120, 40_000.0, max_running=256
    ),
}


def routes() -> dict[str, Route]:
    """Return the routes to compare."""
    return {
        "consistent_hash": consistent_hash,
        "round_robin": round_robin,
        "least_loaded": least_loaded,
        "cache_aware": cache_aware,
        "prefix_and_load": PrefixAndLoad(),
        "prefix_and_load_1": PrefixAndLoad(beta=1.0),
    }


def cache_aware(request: Request, engines: Sequence[EngineState]) -> int:
    """The policy of this name in vllm-router, with the values that it starts with.

    Half of a prompt and more goes where it is, anything else to the shortest queue; all do while
    one queue is longer than another by 32 and by half.
    """
    queues = [engine.in_flight for engine in engines]
    shortest = queues.index(min(queues))
    if max(queues) - min(queues) > 32 and max(queues) > 1.5 * min(queues):
        return shortest
    most = max(range(len(engines)), key=lambda place: engines[place].matched)
    return most if 2 * engines[most].matched > len(request.pages) else shortest


def _tasks(count: int, shape: Shape, *, seed: int) -> list[Session]:
    """Draw coding tasks: 12 to 44 turns, contexts of 30k tokens on average and 120k at most."""
    draw = np.random.default_rng(seed)

    def tokens(median: float, sigma: float) -> int:
        return 1 + int(draw.lognormal(np.log(median), sigma))

    def turn(first: bool) -> AgentTurn:
        new = tokens(4000, 0.5) if first else tokens(1200, 0.8)
        tool_s = float(draw.lognormal(np.log(shape.tool_s), 1.0))
        return AgentTurn(new, tokens(shape.answer_tokens, 0.8), tool_s)

    return [
        Session(
            f"task-{task}",
            tuple(turn(first=not place) for place in range(int(draw.integers(12, 45)))),
            shared="system",
            shared_tokens=2048,
        )
        for task in range(count)
    ]
