"""Planning of GPUs, training speed and staleness before a training run.

`split` divides GPUs. `simulation` runs the asynchronous loop in virtual time. The modules
`capacity` (KV memory), `traffic` (bytes that a rank receives in a micro-batch) and `dsa` (sparse
attention) compute costs from formulas.
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
