"""Train mixture-of-experts models over many ranks with torch's own FSDP2 and process groups:
degrees are planned and checked as numbers, experts are shared by token dispatch, gradients are
plain sums that do not depend on how the run is parallelised, and norms clip across any mix of
meshes. Models come in through `adapters`.
"""

from .all_to_all import AllToAllDispatcher, OncePerRankDispatcher
from .dispatcher import Dispatched, LocalDispatcher, TokenDispatcher
from .experts import GroupedExperts, grouped_linear, grouped_swiglu
from .fsdp import clip_grad_norm_, fully_shard_moe, global_token_count
from .mesh import Meshes, MeshPlan, plan_mesh
from .placement import Placement, plan_placement
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
    "OncePerRankDispatcher",
    "Placement",
    "Run",
    "SequencePlan",
    "TokenDispatcher",
    "clip_grad_norm_",
    "fully_shard_moe",
    "global_token_count",
    "grouped_linear",
    "grouped_swiglu",
    "plan_mesh",
    "plan_placement",
    "plan_sequence",
    "ring_attention",
    "ulysses_attention",
]
