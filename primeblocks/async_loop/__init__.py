"""Reinforcement learning in which generation never waits for training.

Made of a buffer of rollouts with bounded capacity and bounded staleness (`adapters.zmq` fills it
from other processes), a loop that generates, trains and publishes at the same time, limits and
retries for what engines get (`scheduler`), and a journal from which a run goes on after a crash.
"""

from ..rollout import Group, Rollout, cache_salt
from . import scheduler
from .buffer import RolloutBuffer
from .journal import Journal
from .ledger import Partial
from .loop import AsyncLoop
from .staleness import StalenessPolicy, staleness
from .step import Step

__all__ = [
    "AsyncLoop",
    "Group",
    "Journal",
    "Partial",
    "Rollout",
    "RolloutBuffer",
    "StalenessPolicy",
    "Step",
    "cache_salt",
    "scheduler",
    "staleness",
]
