"""Reinforcement learning that generates rollouts while it trains.

`AsyncLoop` generates, trains and publishes at the same time. A `RolloutBuffer` bounds the number of
finished groups and their staleness, and `adapters.zmq` fills the buffer from other processes.
`scheduler` limits requests to the engine and retries failed requests. A `Journal` lets a training
run resume after a crash.
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
