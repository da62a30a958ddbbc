"""Plans before a training run: GPUs of trainer and engine, and simulated speed and staleness.

`split` divides GPUs. `simulation` runs the asynchronous loop in virtual time. Three modules compute
costs from formulas: `capacity` (KV memory), `traffic` (bytes of a step over ranks), and `dsa`
(sparse attention).
"""

from .engine import EngineModel, decode_latency
from .simulation import Simulation, simulate
from .split import CostTable, SplitPlan, plan_split
from .world import Distribution, Workload, constant, empirical, lognormal

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
