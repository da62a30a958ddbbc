"""Groups of the length and make of real ones: log-probabilities, versions and routes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from primeblocks.async_loop import Group, Rollout

__all__ = ["digest", "make_groups"]

SAMPLES, PROMPT, SHORTEST, LONGEST = 8, 512, 2048, 16384
ROUTE_BYTES = 32  # A token, packed: 4 layers of 8 experts; 48 layers would be most of the bytes.


def make_groups(count: int, *, seed: int = 0) -> list[Group]:
    """Return groups of 8 rollouts of 2k to 16k tokens. Pure."""
    draw = np.random.default_rng(seed)
    groups = []
    for ordinal in range(count):
        lengths = draw.integers(SHORTEST, LONGEST + 1, SAMPLES)
        rollouts = (_rollout(draw, int(length), ordinal) for length in lengths)
        groups.append(Group(f"prompt {ordinal}", tuple(rollouts), ordinal % 3, 1.0, ordinal))
    return groups


def _rollout(draw: np.random.Generator, length: int, prompt: int) -> Rollout:
    return Rollout(
        tokens=draw.integers(0, 150_000, PROMPT + length),
        prompt_length=PROMPT,
        logprobs=-draw.exponential(size=length),
        versions=np.sort(draw.integers(0, 3, length)) + prompt % 3,
        finish_reason="stop",
        prompt_id=f"prompt {prompt}",
        reward=float(draw.random()),
        attachments={"routes": draw.bytes(ROUTE_BYTES * (PROMPT + length))},
    )


def digest(rollouts: Iterable[Iterable[np.ndarray | bytes]]) -> str:
    """Hash the arrays of rollouts, each given as its arrays in order. Pure."""
    state = xxhash.xxh3_128()
    for rollout in rollouts:
        for values in rollout:
            state.update(values if isinstance(values, bytes) else np.ascontiguousarray(values))
    return state.hexdigest()
