"""Sessions of coding agents, drawn after published figures.

Turns: those of 610 recorded sessions, 5 / 29 / 56 / 85 / 99 at least, at the 50th, 90th and 99th
percentile, and at most (NVIDIA-NeMo/RL #3663). Answers: 523 tokens on average, of 357,161 model
calls of coding agents (TraceLab, arXiv:2606.30560: 186.9 million tokens). What tools say is 1,650
tokens on average here, less than there (6,400, which would take 99 turns past 700,000 tokens): an
assumption. Between percentiles turns are linear, and tokens lognormal: the tails of no trace.
"""

from __future__ import annotations

import numpy as np

from benchmarks.serving_parts.simulator import AgentTurn, Session

__all__ = ["recorded"]

TURNS = ([0.0, 0.5, 0.9, 0.99, 1.0], [5, 29, 56, 85, 99])
ANSWER, SAID, TASK, SYSTEM = 523, 1650, 4500, 2048


def recorded(
    count: int, *, seed: int, answer_tokens: float = ANSWER, tool_s: float = 0.0
) -> list[Session]:
    """Draw sessions; `answer_tokens` is a mean, `tool_s` a median. Pure."""
    draw = np.random.default_rng(seed)

    def tokens(mean: float, sigma: float) -> int:
        return 1 + int(draw.lognormal(np.log(mean) - sigma**2 / 2, sigma))

    def turn(first: bool) -> AgentTurn:
        new = tokens(TASK, 0.5) if first else tokens(SAID, 0.8)
        waits = float(draw.lognormal(np.log(tool_s), 1.0)) if tool_s else 0.0
        return AgentTurn(new, tokens(answer_tokens, 0.8), waits)

    return [
        Session(
            f"task-{task}",
            tuple(
                turn(first=not place) for place in range(round(np.interp(draw.random(), *TURNS)))
            ),
            shared="system",
            shared_tokens=SYSTEM,
        )
        for task in range(count)
    ]
