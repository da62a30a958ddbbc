"""Bytes of a rollout of 131,072 tokens with routes, put together over many turns.

Routes are those of GLM-5.1, 75 layers of 8 of 256 experts, as in prime-rl's report of 3,800 such
rollouts of 100k to 150k tokens that took 1,032 GiB, 182 MiB each (prime-rl #2796).
"""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
from numpy.typing import NDArray

from primeblocks.async_loop import Rollout
from primeblocks.attachments import Aligned
from primeblocks.capture import Conversation

__all__ = ["figures"]

TOKENS, TURNS, LAYERS, TOP_K, EXPERTS = 131_072, 64, 75, 8, 256
PRIME_RL_BYTES = 182 << 20


def _routes(start: int, stop: int) -> NDArray[np.uint8]:
    """Distinct experts for each layer of tokens `[start, stop)`, always the same."""
    seeds = np.arange(start, stop)[:, None, None] * 31 + np.arange(LAYERS)[:, None] * 17
    return ((seeds + np.arange(TOP_K) * 29) % EXPERTS).astype(np.uint8)


def _converse() -> tuple[Rollout, float]:
    """A rollout, and the seconds that its turns took beside the engine's."""
    tokens, seconds = np.arange(TOKENS), 0.0
    conversation, per_turn = Conversation(), TOKENS // TURNS
    for turn in range(TURNS):
        begin, stop = turn * per_turn, (turn + 1) * per_turn
        asked, known = begin + per_turn // 2, max(0, begin - 1)
        sampled = stop - asked
        prompt, answer = tokens[:asked].tolist(), tokens[asked:stop].tolist()
        logprobs, versions = np.full(sampled, -1.0), np.full(sampled, turn // 8)
        routes = {"routes": Aligned.rows(_routes(known, stop - 1), start=known)}
        start_s = time.perf_counter()
        conversation.append(
            prompt, answer, logprobs=logprobs, versions=versions, attachments=routes
        )
        seconds += time.perf_counter() - start_s
    start_s = time.perf_counter()
    (rollout,) = conversation.rollouts()
    return rollout, seconds + time.perf_counter() - start_s


def figures() -> dict[str, tuple[float, str, str]]:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    rollout, _ = _converse()
    held, peak = (each - before for each in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    _, seconds = _converse()
    rows = rollout.attachments["routes"].value
    assert np.array_equal(rollout.tokens, np.arange(TOKENS))
    assert np.array_equal(rows, _routes(0, TOKENS - 1))
    peer = "prime-rl #2796, 182 MiB"
    return {
        "async_loop.rollout_131k.bytes_fraction_of_prime_rl": (held / PRIME_RL_BYTES, "x", peer),
        "async_loop.rollout_131k.peak_bytes_fraction": (peak / PRIME_RL_BYTES, "x", peer),
        "async_loop.rollout_131k.ms_per_turn": (seconds / TURNS * 1e3, "ms", ""),
    }
