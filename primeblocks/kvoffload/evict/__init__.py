"""Choices of the page that leaves a full tier, the ledger behind them, and traces to judge by."""

from .arc import arc
from .evict import Candidate, Choice, Evict, Live, Snapshot, VersionAware, lru

__all__ = [
    "Candidate",
    "Choice",
    "Evict",
    "Live",
    "Snapshot",
    "VersionAware",
    "arc",
    "lru",
]
