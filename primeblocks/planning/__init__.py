"""Plans before a run: who gets which GPUs, how old rollouts will be, and a simulation of it."""

from .distribution import Distribution, constant, empirical, lognormal, pareto
from .engine import EngineModel, decode_latency
from .lag import LagPrediction, predict_lag
from .simulation import Simulation, simulate
from .split import CostTable, plan_split
from .splitplan import SplitPlan
from .world import Workload

__all__ = [
    "CostTable",
    "Distribution",
    "EngineModel",
    "LagPrediction",
    "Simulation",
    "SplitPlan",
    "Workload",
    "constant",
    "decode_latency",
    "empirical",
    "lognormal",
    "pareto",
    "plan_split",
    "predict_lag",
    "simulate",
]
