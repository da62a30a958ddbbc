"""Reinforcement learning in which generation never waits for training.

Made of rollouts that know the policy version of every token, a buffer with bounded capacity and
bounded staleness, a loop that generates, trains and publishes at the same time, limits and retries
for what engines get (`scheduler`), a buffer for several processes of a machine (`shared`),
`losses` corrected for off-policy tokens, `packing` into balanced micro-batches, and `plan`: which
GPUs train, how old rollouts will be, and a simulation of the run.
"""

from . import losses, packing, plan, scheduler, shared
from .buffer import RolloutBuffer
from .journal import Journal
from .ledger import Partial
from .loop import AsyncLoop
from .rollout import Group, Rollout
from .staleness import StalenessPolicy, cache_salt, staleness
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
    "losses",
    "packing",
    "plan",
    "scheduler",
    "shared",
    "staleness",
]
