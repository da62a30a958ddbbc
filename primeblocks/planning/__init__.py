"""Plans before a run: who gets which GPUs, and a simulation of it: how fast, and how old.

In closed form beside them: `capacity` of KV memory, `traffic` of a step over ranks, and `dsa`, the
same for sparse attention.
"""

from .distribution import Distribution, constant, empirical, lognormal
from .engine import EngineModel, decode_latency
from .simulation import Simulation, simulate
from .split import CostTable, SplitPlan, plan_split
from .world import Workload

__all__ = [
    "CostTable",
    "Distribution",
    "EngineModel",
    "Simulation",
    "SplitPlan",
    "Workload",
    "constant",
    "decode_latency",
    "empirical",
    "lognormal",
    "plan_split",
    "simulate",
]
