"""Plans before a training run: the GPUs of trainer and engine, and a simulation of speed and age.

`split` divides GPUs. `simulation` plays the asynchronous loop in virtual time. Three modules
compute in closed form: `capacity` (KV memory), `traffic` (bytes of a step over ranks), and `dsa`
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
