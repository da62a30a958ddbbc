"""Train mixture-of-experts models over many ranks with torch's own FSDP2 and process groups.

`plan_mesh` plans the degrees of parallelism. `plan_sequence` splits a packed sequence over ranks.
Dispatchers send tokens to the ranks of their experts. Every gradient is a plain sum over all ranks,
for any degrees of parallelism. `clip_grad_norm_` works on any mix of meshes. Functions that
parallelize the model of another package are in `adapters`.
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
