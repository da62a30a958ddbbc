"""Groups of the make of real ones: tokens, log-probabilities, versions, masks and routes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from primeblocks.async_loop import Group, Rollout

__all__ = ["SHAPES", "Shape", "make_groups"]

PROMPT = 16


@dataclass(frozen=True)
class Shape:
    """Groups of one size.

    Args:
        groups: of a run, together.
        samples: rollouts of a group.
        tokens: of a completion, on average; they vary by half of it to both sides.
        route_bytes: a token: 32 are 4 layers of 8 experts, packed.
    """

    groups: int
    samples: int
    tokens: int
    route_bytes: int


# By the bytes of a rollout: short answers, long ones, and 131k tokens with routes of 16 layers.
SHAPES = {
    "4kB": Shape(groups=128, samples=8, tokens=60, route_bytes=32),
    "1MB": Shape(groups=32, samples=8, tokens=18_400, route_bytes=32),
    "20MB": Shape(groups=4, samples=4, tokens=131_072, route_bytes=128),
}


def make_groups(shape: Shape, ordinals: Iterable[int]) -> list[Group]:
    """Return the groups of these ordinals. Pure."""
    return [_group(shape, ordinal) for ordinal in ordinals]


def _group(shape: Shape, ordinal: int) -> Group:
    draw = np.random.default_rng(ordinal)
    least, most = shape.tokens // 2, shape.tokens + shape.tokens // 2
    lengths = draw.integers(least, most + 1, shape.samples)
    rollouts = (_rollout(draw, int(length), ordinal, shape.route_bytes) for length in lengths)
    return Group(f"prompt {ordinal}", tuple(rollouts), ordinal % 3, 1.0, ordinal)


def _rollout(draw: np.random.Generator, length: int, ordinal: int, route_bytes: int) -> Rollout:
    return Rollout(
        tokens=draw.integers(0, 150_000, PROMPT + length),
        prompt_length=PROMPT,
        logprobs=-draw.exponential(size=length),
        versions=np.sort(draw.integers(0, 3, length)) + ordinal % 3,
        finish_reason="stop",
        prompt_id=f"prompt {ordinal}",
        reward=float(draw.random()),
        attachments={"routes": draw.bytes(route_bytes * (PROMPT + length))},
    )
