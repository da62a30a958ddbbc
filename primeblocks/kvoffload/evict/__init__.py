"""Policies that choose the page to evict from a full tier: pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from ...errors import UsageError, check_counts, shown
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
    """Facts that a store keeps only for policies that need them.

    A store also keeps the tick of each page's last use, for every policy.
    """

    NONE = 0
    VERSIONS = auto()  # pages by policy version
    ENDS = auto()  # users of each page, and whether all have ended
    STATES = auto()  # rollouts that run, wait for a tool, or queue


@dataclass(slots=True, eq=False)
class Candidate:
    """The facts about one page of a tier.

    Args:
        key: the name of the page.
        last_used: the tick of the last save or load. Each save or load is one tick.
        rollouts: the rollouts that use the page and have not ended. The set is empty if all
            rollouts have ended, and None if no save or load of the page passed a `rollout`. The set
            belongs to the tier's `PageLedger`, so do not change the set.
    """

    key: PageKey
    last_used: int
    rollouts: set[Hashable] | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """A rollout that has not ended, and the last page that only this rollout uses.

    Args:
        page: the last page that only this rollout uses.
        state: "runs", "waits" or "queues".
        since: the tick at which the state began. Each save or load of a running rollout sets
            `since` to the current tick.
        position: the place of the rollout in the engine's queue, counted from 0, or 0 if the
            rollout does not queue.
        expected_ticks: the expected number of ticks until the rollout runs again, computed from the
            running means of earlier waits.
    """

    page: Candidate
    state: str
    since: int
    position: int = 0
    expected_ticks: float = 0.0


class Snapshot(NamedTuple):
    """The facts about a full tier, and the pages from which a policy may choose.

    "Needs `X`" means that a policy must declare `Facts.X` to read the field.

    Args:
        version: the current policy version.
        tick: the current tick.
        oldest: the least recently used page of all.
        by_version: the least recently used page of each version. Needs `VERSIONS`.
        ended: among pages whose rollouts have all ended, the page with the earliest end. A page's
            end is the end of its last rollout, or its last use if that is later. Needs `ENDS`.
        live: the running rollout whose last save or load is oldest, and the last rollout of the
            queue. Also, for each reason, the rollout that has waited longest. Needs `STATES`.
        shared: the least recently used page that several rollouts use. Needs `ENDS`.
        unnamed: the least recently used page whose saves and loads did not pass a `rollout`. Needs
            `ENDS`.
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
    """The page that a policy chose to evict.

    Args:
        page: one of the snapshot's candidates.
        demote: whether to write the page to lower tiers. Evictions from a lower tier ignore it.
    """

    page: Candidate
    demote: bool = True


class Evict(Protocol):
    """A policy: a pure function of a snapshot.

    The attribute `facts` of a policy declares the facts that the policy needs. A policy without
    `facts` gets snapshots with only `version`, `tick` and `oldest`.
    """

    def __call__(self, snapshot: Snapshot) -> Choice: ...


Part = TypeVar("Part", bound=Callable[..., object])


def _needs(facts: Facts) -> Callable[[Part], Part]:
    def declare(part: Part) -> Part:
        vars(part)["facts"] = facts
        return part

    return declare


def facts_of(*policies: object) -> Facts:
    """Return all facts that policies, or parts of policies, declare.

    Raises UsageError for a class, or an object that cannot be called.
    """
    found = Facts.NONE
    for policy in policies:
        if not callable(policy) or isinstance(policy, type):
            raise UsageError(f"pass a policy, such as lru or VersionAware(8); got {shown(policy)}.")
        found |= getattr(policy, "facts", Facts.NONE)
    return found


_PROMPT = 8  # A prompt's page is used so many times sooner, or later, than its age predicts.


def lru(snapshot: Snapshot) -> Choice:
    """Choose the least recently used page of all, and demote it. Pure."""
    return Choice(snapshot.oldest)


@_needs(Facts.VERSIONS)
def stale(snapshot: Snapshot, *, max_staleness: int | None) -> Choice | None:
    """Choose a page of the oldest version below `version - max_staleness`. Pure.

    The chosen page is not demoted. With `max_staleness=None`, no page is chosen.
    """
    if max_staleness is None:
        return None
    last = snapshot.version - max_staleness
    dead = [page for page in snapshot.by_version if (page.key.version or 0) < last]
    if not dead:
        return None
    return Choice(min(dead, key=lambda page: page.key.version or 0), demote=False)


@_needs(Facts.ENDS)
def ended(snapshot: Snapshot) -> Choice | None:
    """Choose `snapshot.ended`, the page with the earliest end. Pure.

    The chosen page is not demoted.
    """
    return Choice(snapshot.ended, demote=False) if snapshot.ended is not None else None


@_needs(Facts.ENDS | Facts.STATES)
def by_schedule(snapshot: Snapshot) -> Choice | None:
    """Choose a page by the state of its rollout: running, waiting or queued. Pure.

    Pages of running rollouts are evicted first, because the engine also has copies of these pages.
    Pages of waiting rollouts and pages without a rollout are evicted next. Pages of queued rollouts
    are evicted last, beginning with the last rollout in the queue.
    """
    far = {(_rank(live), -live.since, live.page.last_used): live.page for live in snapshot.live}
    if (page := snapshot.unnamed) is not None:
        far[(1, 0), -page.last_used, page.last_used] = page
    return Choice(far[max(far)]) if far else None


def _rank(live: Live) -> tuple[int, int]:
    return ("queues", "waits", "runs").index(live.state), live.position


@_needs(Facts.ENDS | Facts.STATES)
def by_waits(snapshot: Snapshot) -> Choice | None:
    """Choose the page with the latest expected next use, from the running means of waits. Pure.

    Among rollouts that wait for the same reason, pages of the rollout that has waited longest are
    chosen first. For a running rollout, the next use is expected after 1.5 times the mean of all
    waits, plus the time in the engine's queue. The means are not used before the first
    wait was measured, or after a rollout took more than eight times the predicted time. Then the
    next use is expected after as many ticks as have passed since `Live.since`.

    A page may also belong to no rollout, to several rollouts or to ended rollouts. Its next use is
    expected after a multiple of the time since its last use. The factor is 1 for a page without a
    rollout, 1/8 for a page of several rollouts, and 8 for a page of ended rollouts. A page of ended
    rollouts is not demoted, but may belong to the prompt of a later rollout.
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

    1. Pages of versions below `version - max_staleness` are evicted first (`stale`), because the
       trainer refuses rollouts of these versions.
    2. Pages whose rollouts have all ended are evicted next (`ended`).

    The policy does not estimate how long rollouts will wait. The policy is worse than `lru` only if
    pages of old versions or of ended rollouts are loaded again.

    Args:
        max_staleness: pages with a larger staleness than this number are useless. With None, rule 1
            does not apply.

    Raises:
        PlanError: `max_staleness` is negative.
    """

    facts: ClassVar[Facts] = facts_of(stale, ended)
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None:
            check_counts(least=0, max_staleness=self.max_staleness)

    def __call__(self, snapshot: Snapshot) -> Choice:
        old = stale(snapshot, max_staleness=self.max_staleness)
        return old or ended(snapshot) or lru(snapshot)


@dataclass(frozen=True)
class RolloutAware:
    """A policy that evicts useless pages first, then the page with the latest expected next use.

    1. Pages of versions below `version - max_staleness` are evicted first, as in `VersionAware`.
    2. Then the page with the latest expected next use is evicted (`by_waits`). Queued rollouts are
       ordered by their place in the queue, and waiting rollouts by the mean wait for their reason.
       The last page of a rollout is evicted first, because it is useless without the pages before.

    The policy needs the `rollout` of each save and load, and calls of `pause`, `queue` and `end`.
    If you never pass a `rollout`, rule 2 chooses as `lru` does. A mean says little about waits with
    a heavy tail. For waits with a heavy tail, the policy can fall to 0.38 of the hits of `lru` (see
    `docs/kvoffload_eviction.md`).

    Args:
        max_staleness: pages with a larger staleness than this number are useless. With None, rule 1
            does not apply.

    Raises:
        PlanError: `max_staleness` is negative.
    """

    facts: ClassVar[Facts] = facts_of(stale, by_waits)
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None:
            check_counts(least=0, max_staleness=self.max_staleness)

    def __call__(self, snapshot: Snapshot) -> Choice:
        old = stale(snapshot, max_staleness=self.max_staleness)
        return old or by_waits(snapshot) or lru(snapshot)
