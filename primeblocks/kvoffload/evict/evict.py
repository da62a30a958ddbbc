"""Choices of the page that leaves a full tier: pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...errors import PlanError
from ..page import PageKey

__all__ = ["Candidate", "Choice", "Evict", "Live", "Snapshot", "VersionAware", "lru"]


@dataclass(slots=True, eq=False)
class Candidate:
    """The facts about one page of a tier. The ledger's own entry: read it, keep no reference.

    Args:
        last_used: tick of the last save or load. Each of them is one tick.
        uses: saves and loads since it came; at least 2 if it had left not long before.
        rollouts: its users that have not ended; empty if all have ended, None if none was named.
    """

    key: PageKey
    last_used: int
    uses: int = 1
    rollouts: set[Hashable] | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """A page that may be used again, on behalf of all pages like it.

    Args:
        worth: expected uses per tick that it is kept from now on.
        since: tick at which its rollouts' phase began, or of its last use.
    """

    page: Candidate
    worth: float
    since: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A full tier, reduced to the pages that may have to leave.

    Args:
        version: the policy's.
        once: the least recently used of the pages used once; None if there is none.
        often: the same for the pages used more often.
        once_pages: number of pages used once.
        once_target: number of them that ARC would keep; its `p`.
        from_often: whether the page that needs room left the tier as one used often.
        by_version: the least recently used page of each version.
        ended: the page whose last rollout ended first.
        live: for each phase (writing, or a kind of wait), the last own pages of the rollouts that
            began it first and last; and the least recently used page of several rollouts, and of
            none.
    """

    version: int
    once: Candidate | None
    often: Candidate | None
    once_pages: int
    once_target: float
    from_often: bool
    by_version: Sequence[Candidate]
    ended: Candidate | None
    live: Sequence[Live]


@dataclass(frozen=True, slots=True)
class Choice:
    """A victim.

    Args:
        page: one of the snapshot's candidates.
        demote: whether it is worth a place in the next tier.
    """

    page: Candidate
    demote: bool = True


class Evict(Protocol):
    """A pure function of a snapshot; the tier has at least one page."""

    def __call__(self, snapshot: Snapshot) -> Choice: ...


def lru(snapshot: Snapshot) -> Choice:
    """Choose the least recently used page of all; always worth the next tier. Pure."""
    found = [page for page in (snapshot.once, snapshot.often) if page is not None]
    return Choice(min(found, key=lambda page: page.last_used))


@dataclass(frozen=True)
class VersionAware:
    """A policy that evicts pages that no rollout will use, then those least worth their place.

    1. Pages of versions below `version - max_staleness`, the oldest version first: the trainer
       refuses their rollouts. Not demoted.
    2. Pages whose rollouts have all ended, in the order of the ends. Not demoted.
    3. The page with the fewest expected uses per tick. A rollout's last page goes first: a page
       is of no use without those before it.

    Rule 2 needs callers that name rollouts and end them. Rule 3 knows as much as it is told:
    which rollout uses which page, and what it waits for. Untold, it is least recently used.

    Raises:
        PlanError: `max_staleness` is negative.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise PlanError(f"max_staleness counts versions; got {self.max_staleness}")

    def __call__(self, snapshot: Snapshot) -> Choice:
        dead = [page for page in snapshot.by_version if self._dead(page, snapshot.version)]
        if dead:
            return Choice(min(dead, key=lambda page: page.key.version or 0), demote=False)
        if snapshot.ended is not None:
            return Choice(snapshot.ended, demote=False)
        return Choice(min(snapshot.live, key=lambda live: (live.worth, live.since)).page)

    def _dead(self, page: Candidate, version: int) -> bool:
        return page.key.version is not None and page.key.version < version - self.max_staleness
