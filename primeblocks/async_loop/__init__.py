"""Reinforcement learning in which generation never waits for training.

Made of rollouts that know the policy version of every token, conversations that become such
rollouts turn by turn, a buffer with bounded capacity and bounded staleness (`adapters.zmq` fills it
from other processes), a loop that generates, trains and publishes at the same time, limits and
retries for what engines get (`scheduler`), `losses` corrected for off-policy tokens, `packing` into
balanced micro-batches, and `plan`: which GPUs train, how old rollouts will be, and a simulation of
the run.
"""

from . import losses, packing, plan, scheduler
from .buffer import RolloutBuffer
from .conversation import Conversation
from .journal import Journal
from .ledger import Partial
from .loop import AsyncLoop
from .rollout import Group, Rollout
from .staleness import StalenessPolicy, cache_salt, staleness
from .step import Step

__all__ = [
    "AsyncLoop",
    "Conversation",
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
    "staleness",
]
