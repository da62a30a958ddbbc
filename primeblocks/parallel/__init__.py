"""Train mixture-of-experts models over many ranks with torch's own FSDP2 and process groups:
degrees are planned and checked as numbers, experts are shared by token dispatch, gradients are
plain sums that do not depend on how the run is parallelised, and norms clip across any mix of
meshes. Models come in through `adapters`.
"""

from .experts import (
    AllToAllDispatcher,
    Dispatched,
    GroupedExperts,
    LocalDispatcher,
    TokenDispatcher,
    grouped_swiglu,
)
from .fsdp import clip_grad_norm_, fully_shard_moe, global_token_count
from .mesh import Meshes, MeshPlan, plan_mesh
from .ring import ring_attention
from .sequence import Run, SequencePlan, plan_sequence
from .ulysses import ulysses_attention

__all__ = [
    "AllToAllDispatcher",
    "Dispatched",
    "GroupedExperts",
    "LocalDispatcher",
    "MeshPlan",
    "Meshes",
    "Run",
    "SequencePlan",
    "TokenDispatcher",
    "clip_grad_norm_",
    "fully_shard_moe",
    "global_token_count",
    "grouped_swiglu",
    "plan_mesh",
    "plan_sequence",
    "ring_attention",
    "ulysses_attention",
]
