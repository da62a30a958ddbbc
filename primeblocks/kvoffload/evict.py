"""Which page leaves a full tier: pure choices over a snapshot."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import PlanError
from .page import PageKey

__all__ = ["Candidate", "Choice", "Evict", "Snapshot", "VersionAware", "lru"]


@dataclass(slots=True, eq=False)
class Candidate:
    """What a tier knows of one page. The ledger's own entry: read it, and keep no reference.

    Args:
        last_used: tick of the last save or load. Each of them is one tick.
        filed: its place in the order in which pages were last used or lost their last rollout.
        uses: saves and loads since it came; at least 2 if it had left not long before.
        rollouts: who uses it and has not ended; empty if all have ended, None if nobody said.
    """

    key: PageKey
    last_used: int
    filed: int = 0
    uses: int = 1
    rollouts: set[Hashable] | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A full tier, reduced to the pages that may have to leave.

    A lane holds the pages of one version with no known rollout, one, several, or ended ones.

    Args:
        version: the policy's.
        tick: now.
        once: the least recently used of the pages used once; None if there is none.
        often: the same for the pages used more often.
        once_pages: how many pages were used once.
        once_target: how many of them ARC would keep; its `p`.
        from_often: whether the page that needs room left the tier as one used often.
        oldest: the page of each lane that was filed first.
        newest: the last filed page of each lane of pages with one rollout.
        patience: ticks after which a page is less likely to be used soon than one just used.
    """

    version: int
    tick: int
    once: Candidate | None
    often: Candidate | None
    once_pages: int
    once_target: float
    from_often: bool
    oldest: Sequence[Candidate]
    newest: Sequence[Candidate]
    patience: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A victim.

    Args:
        page: one of the snapshot's candidates.
        demote: whether it is worth a place in the next tier.
        tail: take the last page that its rollout brought in its place, if it has one rollout: a
            page is of no use without those before it.
    """

    page: Candidate
    demote: bool = True
    tail: bool = False


class Evict(Protocol):
    """A pure function of a snapshot; the tier has at least one page."""

    def __call__(self, snapshot: Snapshot) -> Choice: ...


def lru(snapshot: Snapshot) -> Choice:
    """The least recently used page of all; always worth the next tier. Pure."""
    found = [page for page in (snapshot.once, snapshot.often) if page is not None]
    return Choice(min(found, key=lambda page: page.last_used))


@dataclass(frozen=True)
class VersionAware:
    """Pages that no rollout will use go first; then those whose rollout comes back last.

    1. Pages of versions below `version - max_staleness`, the oldest version first: the trainer
       refuses their rollouts. Not demoted.
    2. Pages whose rollouts have all ended, in the order of the ends. Not demoted.
    3. The least recently used page, if it has been waited for longer than is worth it.
    4. The most recently used page: its rollout stays away for longer than those waited for
       already. With more rollouts than fit, least recently used drops each page just before its
       turn. First those of the last admissible version, which may be dropped before they return.

    Rules 2 and 4 need callers that name rollouts; without, 3 is least recently used.

    Raises:
        PlanError: `max_staleness` is negative.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise PlanError(f"max_staleness counts versions; got {self.max_staleness}")

    def __call__(self, snapshot: Snapshot) -> Choice:
        last_live = snapshot.version - self.max_staleness
        rank, page = min(
            ((_rank(page, last_live=last_live), page) for page in snapshot.oldest),
            key=lambda ranked: ranked[0],
        )
        if rank[0] != _LIVE:
            return Choice(page, demote=False)
        if snapshot.tick - page.last_used <= snapshot.patience and snapshot.newest:
            closing = [page for page in snapshot.newest if page.key.version == last_live]
            page = max(closing or snapshot.newest, key=lambda page: page.filed)
        return Choice(page, tail=True)


_DEAD, _ENDED, _LIVE = range(3)


def _rank(page: Candidate, *, last_live: int) -> tuple[int, int, int]:
    version = page.key.version
    if version is not None and version < last_live:
        return _DEAD, version, page.filed
    ended = page.rollouts is not None and not page.rollouts
    return (_ENDED if ended else _LIVE), page.filed, 0
