"""Train mixture-of-experts models over many ranks with torch's own FSDP2 and process groups.

Degrees are planned and checked as numbers, experts are shared by token dispatch, sequences are
split by a plan, gradients are plain sums that do not depend on how the run is parallelised, and
norms clip across any mix of meshes. Models come in through `adapters`.
"""

from . import attention, experts, linear, memory
from .fsdp import check_optimizer, clip_grad_norm_, fully_shard_moe, global_token_count
from .mesh import Meshes, MeshPlan, plan_mesh
from .sequence import SequencePlan, plan_sequence

__all__ = [
    "MeshPlan",
    "Meshes",
    "SequencePlan",
    "attention",
    "check_optimizer",
    "clip_grad_norm_",
    "experts",
    "fully_shard_moe",
    "global_token_count",
    "linear",
    "memory",
    "plan_mesh",
    "plan_sequence",
]
