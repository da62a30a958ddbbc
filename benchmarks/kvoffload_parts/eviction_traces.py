"""Rollouts in time: the pages that they ask for, when, and what they wait for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from primeblocks.kvoffload import PageKey

__all__ = ["Advance", "End", "Event", "Trace", "Use", "Wait"]


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a rollout's pages, those of its prompt first.

    Args:
        asked: number of them saved before, by it or by another; a miss is computed again. The rest
            is new. Zero at the end of a turn, when the turn's own pages are saved.
    """

    rollout: Hashable
    pages: tuple[PageKey, ...]
    asked: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The start of a wait: no writing until `what`, a tool or the "queue", is over."""

    rollout: Hashable
    what: Hashable


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rollout: done, or dropped because it became too old."""

    rollout: Hashable


@dataclass(frozen=True, slots=True)
class Advance:
    """The policy's step to `version`."""

    version: int


Event = Use | Wait | End | Advance


@dataclass(frozen=True)
class Trace:
    """Events of a run, in order.

    Args:
        working_pages: pages of the rollouts in flight; the median over all requests.
        dropped: rollouts that became too old, of `rollouts` that began.
    """

    events: tuple[Event, ...]
    working_pages: int
    rollouts: int = 0
    dropped: int = 0
