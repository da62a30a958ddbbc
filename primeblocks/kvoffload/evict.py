"""Which page leaves a full tier: pure choices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import PlanError
from .page import PageKey

__all__ = ["Candidate", "Choice", "Evict", "Ledger", "VersionAware", "lru"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The least recently used page of one policy version.

    Args:
        version: policy version of the page; None never goes stale.
        last_used: tick of the last save or load; ticks only grow.
    """

    version: int | None
    last_used: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A victim.

    Args:
        index: position of the victim among the candidates.
        demote: whether the page is worth a place in the next tier.
    """

    index: int
    demote: bool


class Evict(Protocol):
    """A pure function of the candidates, one for each version, and the current version."""

    def __call__(self, candidates: Sequence[Candidate], *, version: int) -> Choice: ...


def lru(candidates: Sequence[Candidate], *, version: int) -> Choice:
    """The least recently used page of all; always worth the next tier. Pure."""
    oldest = min(range(len(candidates)), key=lambda i: candidates[i].last_used)
    return Choice(oldest, demote=True)


@dataclass(frozen=True)
class VersionAware:
    """Pages that no rollout may use again go first; then least recently used.

    With policy version `v`, rollouts of versions below `v - max_staleness` are refused by the
    trainer, so their pages are dead: the oldest version goes first, and it is not demoted.

    Raises:
        PlanError: `max_staleness` is negative.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise PlanError(f"max_staleness counts versions; got {self.max_staleness}")

    def __call__(self, candidates: Sequence[Candidate], *, version: int) -> Choice:
        oldest_live = version - self.max_staleness
        dead = [
            (candidate.version, index)
            for index, candidate in enumerate(candidates)
            if candidate.version is not None and candidate.version < oldest_live
        ]
        if dead:
            return Choice(min(dead)[1], demote=False)
        return lru(candidates, version=version)


class Ledger:
    """When each page of a tier was last used, by version.

    A choice costs one comparison for each version that has pages, not for each page.
    """

    def __init__(self, keys: Iterable[PageKey] = ()) -> None:
        self._lanes: dict[int | None, OrderedDict[PageKey, int]] = {}
        self._tick = 0
        for key in keys:
            self.touch(key)

    def touch(self, key: PageKey) -> None:
        """The page is there and was just used."""
        self._tick += 1
        lane = self._lanes.setdefault(key.version, OrderedDict())
        lane[key] = self._tick
        lane.move_to_end(key)

    def remove(self, key: PageKey) -> None:
        """The page is gone; unknown keys are ignored."""
        lane = self._lanes.get(key.version)
        if lane is not None and lane.pop(key, None) is not None and not lane:
            del self._lanes[key.version]

    def victim(self, evict: Evict, *, version: int) -> tuple[PageKey, bool]:
        """The page that `evict` chooses, and whether to demote it."""
        oldest = [next(iter(lane.items())) for lane in self._lanes.values()]
        choice = evict([Candidate(key.version, used) for key, used in oldest], version=version)
        return oldest[choice.index][0], choice.demote
