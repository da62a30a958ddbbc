"""Who leaves a full tier, what a tier knows of its pages, and traces to judge it by."""

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
