"""Choices of the page that leaves a full tier: pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from ...errors import PlanError
from ..page import PageKey

__all__ = [
    "Candidate",
    "Choice",
    "Evict",
    "Facts",
    "Live",
    "RolloutAware",
    "Snapshot",
    "VersionAware",
    "by_schedule",
    "by_waits",
    "ended",
    "facts_of",
    "lru",
    "stale",
]


class Facts(Flag):
    """Facts that a store keeps for the policy in use; recency is always kept."""

    NONE = 0
    VERSIONS = auto()  # pages by policy version
    ENDS = auto()  # users of each page, and whether all have ended
    STATES = auto()  # rollouts that run, wait for a tool, or queue
    WAITS = auto()  # running means of the waits


@dataclass(slots=True, eq=False)
class Candidate:
    """The facts about one page of a tier. Its rollouts are the ledger's own set: only read it.

    Args:
        last_used: tick of the last save or load. Each of them is one tick.
        rollouts: its users that have not ended; empty if all have ended, None if none was named.
    """

    key: PageKey
    last_used: int
    rollouts: set[Hashable] | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """A rollout that may come back, and the last of the pages that it alone uses.

    Args:
        state: "runs", "waits" or "queues".
        since: tick at which the state began.
        position: place in the engine's queue, 0 next; 0 in other states.
        expected_ticks: until it runs again, by running means.
    """

    page: Candidate
    state: str
    since: int
    position: int = 0
    expected_ticks: float = 0.0


class Snapshot(NamedTuple):
    """A full tier, reduced to the pages that may have to leave.

    Args:
        version: the policy's.
        oldest: the least recently used page of all.
        by_version: the least recently used page of each version. Needs `VERSIONS`.
        ended: the page whose last rollout ended first. Needs `ENDS`.
        live: of the rollouts that run, or wait for one reason, the one that did so first; of the
            queue, the last. Needs `STATES`.
        shared: the least recently used page of several rollouts. Needs `ENDS`.
        unnamed: the least recently used page of no rollout. Needs `ENDS`.
    """

    version: int
    tick: int
    oldest: Candidate
    by_version: Sequence[Candidate] = ()
    ended: Candidate | None = None
    live: Sequence[Live] = ()
    shared: Candidate | None = None
    unnamed: Candidate | None = None


class Choice(NamedTuple):
    """A victim.

    Args:
        page: one of the snapshot's candidates.
        demote: whether it is worth a place in the next tier.
    """

    page: Candidate
    demote: bool = True


class Evict(Protocol):
    """A pure function of a snapshot.

    It declares the facts that it needs as an attribute `facts`; without one it sees recency alone.
    """

    def __call__(self, snapshot: Snapshot) -> Choice: ...


Part = TypeVar("Part", bound=Callable[..., object])


def _needs(facts: Facts) -> Callable[[Part], Part]:
    def declare(part: Part) -> Part:
        vars(part)["facts"] = facts
        return part

    return declare


def facts_of(*policies: Callable[..., object]) -> Facts:
    """Return the facts that policies, or parts of them, declare."""
    found = Facts.NONE
    for policy in policies:
        found |= getattr(policy, "facts", Facts.NONE)
    return found


_PROMPT = 8  # so much sooner, or later, than a page's age tells, is the next use of a prompt


def lru(snapshot: Snapshot) -> Choice:
    """Choose the least recently used page of all; always worth the next tier. Pure."""
    return Choice(snapshot.oldest)


@_needs(Facts.VERSIONS)
def stale(snapshot: Snapshot, *, max_staleness: int) -> Choice | None:
    """Choose a page of the oldest version below `version - max_staleness`. Not demoted. Pure."""
    last = snapshot.version - max_staleness
    dead = [page for page in snapshot.by_version if (page.key.version or 0) < last]
    if not dead:
        return None
    return Choice(min(dead, key=lambda page: page.key.version or 0), demote=False)


@_needs(Facts.ENDS)
def ended(snapshot: Snapshot) -> Choice | None:
    """Choose the page whose last rollout ended first. Not demoted. Pure."""
    return Choice(snapshot.ended, demote=False) if snapshot.ended is not None else None


@_needs(Facts.ENDS | Facts.STATES)
def by_schedule(snapshot: Snapshot) -> Choice | None:
    """Choose by the scheduler's state: who runs, then who waits, then the end of the queue. Pure.

    The engine itself has the pages of those that run. Pages of no rollout count as waiting.
    """
    far = {(_rank(live), -live.since, live.page.last_used): live.page for live in snapshot.live}
    if (page := snapshot.unnamed) is not None:
        far[(1, 0), -page.last_used, page.last_used] = page
    return Choice(far[max(far)]) if far else None


def _rank(live: Live) -> tuple[int, int]:
    return ("queues", "waits", "runs").index(live.state), live.position


@_needs(Facts.ENDS | Facts.STATES | Facts.WAITS)
def by_waits(snapshot: Snapshot) -> Choice | None:
    """Choose whose next run is farthest, by the running means of the waits. Pure.

    Of rollouts that wait for the same reason, the one that has waited longest goes first. A page
    without a rollout is expected after as long as it was not used, a page of several rollouts after
    an eighth of that. A page of ended rollouts may be a prompt of the next rollout: it is expected
    after eight times as long, and it is not demoted.
    """
    far = [(live.expected_ticks, -live.since, live.page) for live in snapshot.live]
    ages = (snapshot.shared, 1 / _PROMPT), (snapshot.unnamed, 1), (snapshot.ended, _PROMPT)
    for page, times in ages:
        if page is not None:
            far.append((times * (snapshot.tick - page.last_used), -page.last_used, page))
    if not far:
        return None
    page = max(far, key=lambda each: each[:2])[2]
    return Choice(page, demote=page is not snapshot.ended)


@dataclass(frozen=True)
class VersionAware:
    """A policy that evicts pages that no rollout will use first, then the least recently used.

    1. Pages of versions below `version - max_staleness`, the oldest version first: the trainer
       refuses their rollouts. Not demoted.
    2. Pages whose rollouts have all ended, in the order of the ends. Not demoted.

    It guesses nothing about waits, so it loses to `lru` only where pages of ended rollouts are
    asked for again.

    Args:
        max_staleness: None to keep all versions.

    Raises:
        PlanError: `max_staleness` is negative.
    """

    facts: ClassVar[Facts] = facts_of(stale, ended)
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        _check(self.max_staleness)

    def __call__(self, snapshot: Snapshot) -> Choice:
        return _old(snapshot, self.max_staleness) or ended(snapshot) or lru(snapshot)


@dataclass(frozen=True)
class RolloutAware:
    """A policy that evicts what no rollout will use, then what is needed last.

    1. Pages of versions below `version - max_staleness`, as `VersionAware`.
    2. The page that is needed last: of those in the engine's queue by their place, of the others by
       running means of what they wait for; of ended rollouts, as `by_waits` tells. Of a rollout it
       is the last page, which is of no use without those before it.

    It knows as much as it is told: who uses which page, `pause`, `queue`, `end`. Untold, it is
    least recently used. A mean says little about waits with a heavy tail: there it falls to a third
    of `lru`'s hits (`docs/kvoffload_eviction.md` has the cells).

    Args:
        max_staleness: None to keep all versions.

    Raises:
        PlanError: `max_staleness` is negative.
    """

    facts: ClassVar[Facts] = facts_of(stale, by_waits)
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        _check(self.max_staleness)

    def __call__(self, snapshot: Snapshot) -> Choice:
        return _old(snapshot, self.max_staleness) or by_waits(snapshot) or lru(snapshot)


def _old(snapshot: Snapshot, max_staleness: int | None) -> Choice | None:
    return None if max_staleness is None else stale(snapshot, max_staleness=max_staleness)


def _check(max_staleness: int | None) -> None:
    if max_staleness is not None and max_staleness < 0:
        raise PlanError(f"max_staleness counts versions; got {max_staleness}")
