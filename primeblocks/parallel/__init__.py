"""Train mixture-of-experts models over many ranks with torch's own FSDP2 and process groups.

`plan_mesh` plans the degrees of parallelism. `plan_sequence` splits a packed sequence over ranks.
Dispatchers send each token to the ranks of its experts. For any degrees of parallelism, every
gradient is a plain sum over all ranks. `clip_grad_norm_` supports parameters on different meshes.
The subpackage `adapters` contains functions that parallelize models of other packages.
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
