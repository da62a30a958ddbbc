"""Choices of the page that leaves a full tier, and the ledger of facts behind them."""

from .evict import (
    Candidate,
    Choice,
    Evict,
    Facts,
    Live,
    RolloutAware,
    Snapshot,
    VersionAware,
    by_schedule,
    by_waits,
    ended,
    facts_of,
    lru,
    stale,
)

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
