"""The loop when nothing may be stale: generate, train, publish, and repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..rollout import Group, Rollout

__all__ = ["synchronous_steps"]


def synchronous_steps(
    *,
    prompts: Iterable[Any],
    generate: Callable[..., Sequence[Rollout]],
    train: Callable[..., Any],
    publish: Callable[[int], Any],
    batch_size: int,
    version: int = 0,
) -> Iterator[tuple[int, Any]]:
    """Generate a batch, train on it, publish, and repeat. Yields (version, metrics)."""
    remaining = iter(prompts)
    while len(batch := list(islice(remaining, batch_size))) == batch_size:
        groups = tuple(Group(p, tuple(generate(p, version=version)), version) for p in batch)
        metrics = train(groups, version=version)
        version += 1
        publish(version)
        yield version, metrics
