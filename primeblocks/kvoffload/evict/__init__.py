"""Policies that choose the page that leaves a full tier. Each is a pure function of a snapshot."""

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
    """The facts that a store keeps for a policy. It always keeps recency."""

    NONE = 0
    VERSIONS = auto()  # pages by policy version
    ENDS = auto()  # users of each page, and whether all have ended
    STATES = auto()  # rollouts that run, wait for a tool, or queue
    WAITS = auto()  # running means of the waits


@dataclass(slots=True, eq=False)
class Candidate:
    """The facts about one page of a tier.

    Args:
        key: the name of the page.
        last_used: the tick of the last save or load. Each save or load is one tick.
        rollouts: the rollouts that use the page and have not ended. It is empty if all have ended,
            and None if no rollout was ever named. The set belongs to the tier's `PageLedger`, so
            do not change it.
    """

    key: PageKey
    last_used: int
    rollouts: set[Hashable] | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """A rollout that may come back, and the last of the pages that only it uses.

    Args:
        page: that last page.
        state: "runs", "waits" or "queues".
        since: the tick at which the state began.
        position: its place in the engine's queue, from 0. 0 in other states.
        expected_ticks: the expected ticks until it runs again, by running means.
    """

    page: Candidate
    state: str
    since: int
    position: int = 0
    expected_ticks: float = 0.0


class Snapshot(NamedTuple):
    """A full tier, reduced to the pages that may have to leave.

    Args:
        version: the current policy version.
        tick: the current tick.
        oldest: the least recently used page of all.
        by_version: the least recently used page of each version. Needs `VERSIONS`.
        ended: the page whose last rollout ended first. Needs `ENDS`.
        live: the rollout that has run longest, the rollout that has waited longest for each
            reason, and the last rollout of the queue. Needs `STATES`.
        shared: the least recently used page of several rollouts. Needs `ENDS`.
        unnamed: the least recently used page without a named rollout. Needs `ENDS`.
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
    """The page that leaves.

    Args:
        page: one of the snapshot's candidates.
        demote: whether to write the page to the next tier.
    """

    page: Candidate
    demote: bool = True


class Evict(Protocol):
    """A policy: a pure function of a snapshot.

    Its attribute `facts` declares the facts that it needs. Without it, a snapshot only has recency.
    """

    def __call__(self, snapshot: Snapshot) -> Choice: ...


Part = TypeVar("Part", bound=Callable[..., object])


def _needs(facts: Facts) -> Callable[[Part], Part]:
    def declare(part: Part) -> Part:
        vars(part)["facts"] = facts
        return part

    return declare


def facts_of(*policies: Callable[..., object]) -> Facts:
    """Return all facts that policies, or parts of policies, declare."""
    found = Facts.NONE
    for policy in policies:
        found |= getattr(policy, "facts", Facts.NONE)
    return found


_PROMPT = 8  # so much sooner, or later, than a page's age tells, is the next use of a prompt


def lru(snapshot: Snapshot) -> Choice:
    """Choose the least recently used page of all, and demote it. Pure."""
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
    """Choose by the scheduler's state. Pure.

    Pages of running rollouts leave first, because the engine has them. Then come pages of waiting
    rollouts and pages without a rollout, then pages of the last rollout in the queue.
    """
    far = {(_rank(live), -live.since, live.page.last_used): live.page for live in snapshot.live}
    if (page := snapshot.unnamed) is not None:
        far[(1, 0), -page.last_used, page.last_used] = page
    return Choice(far[max(far)]) if far else None


def _rank(live: Live) -> tuple[int, int]:
    return ("queues", "waits", "runs").index(live.state), live.position


@_needs(Facts.ENDS | Facts.STATES | Facts.WAITS)
def by_waits(snapshot: Snapshot) -> Choice | None:
    """Choose the page that is needed last, by the running means of the waits. Pure.

    Among rollouts that wait for one reason, the rollout that has waited longest comes first. A page
    without a rollout is expected to stay unused for as long as it has been unused. A page of
    several rollouts is expected after an eighth of that time. A page of ended rollouts may be the
    prompt of a later rollout. So it is expected after eight times as long, and is not demoted.
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
    """A policy that evicts useless pages first, then the least recently used page.

    1. Pages of versions below `version - max_staleness` leave first, oldest version first, because
       the trainer refuses their rollouts. They are not demoted.
    2. Then come pages whose rollouts have all ended, in the order of the ends. They are not
       demoted.

    The policy makes no guess about waits. It is worse than `lru` only if pages of ended rollouts
    are loaded again.

    Args:
        max_staleness: the staleness up to which pages are kept. With None, pages of all versions
        are kept.

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
    """A policy that evicts useless pages first, then the page that is needed last.

    1. Pages of versions below `version - max_staleness` leave first, as with `VersionAware`.
    2. Then comes the page that is needed last. Queued rollouts are ordered by their place in the
       queue, and waiting rollouts by the mean wait for their reason. `by_waits` describes the other
       pages.
       The last page of a rollout leaves first, because it is useless without the pages before it.

    The policy needs the `rollout` of each save and load, and `pause`, `queue` and `end`. Without
    these calls it is `lru`. A mean says little about waits with a heavy tail. With such waits the
    policy falls to a third of the hits of `lru` (see `docs/kvoffload_eviction.md`).

    Args:
        max_staleness: the staleness up to which pages are kept. With None, pages of all versions
        are kept.

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
        raise PlanError(f"max_staleness counts versions; got {max_staleness}. Pass 0 or more.")
