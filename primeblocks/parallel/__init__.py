"""Train mixture-of-experts models over many ranks with torch's own FSDP2 and process groups:
degrees are planned and checked as numbers, experts are shared by token dispatch, gradients are
plain sums that do not depend on how the run is parallelised, and norms clip across any mix of
meshes. Models come in through `adapters`.
"""

from .activations import OffloadedBytes, offload_activations
from .all_to_all import AllToAllDispatcher, OncePerRankDispatcher
from .cpu_adamw import CpuAdamW
from .dispatcher import Dispatched, LocalDispatcher, TokenDispatcher
from .experts import GroupedExperts, grouped_linear, grouped_swiglu
from .fsdp import clip_grad_norm_, fully_shard_moe, global_token_count
from .linear import causal_conv1d, cut_runs, gated_delta_rule, scan_states, state_space
from .memory import HostMemory, MovedBytes
from .mesh import Meshes, MeshPlan, plan_mesh
from .placement import Placement, plan_placement
from .ring import ring_attention
from .sequence import Run, SequencePlan, plan_sequence
from .ulysses import ulysses_attention

__all__ = [
    "AllToAllDispatcher",
    "CpuAdamW",
    "Dispatched",
    "GroupedExperts",
    "HostMemory",
    "LocalDispatcher",
    "MeshPlan",
    "Meshes",
    "MovedBytes",
    "OffloadedBytes",
    "OncePerRankDispatcher",
    "Placement",
    "Run",
    "SequencePlan",
    "TokenDispatcher",
    "causal_conv1d",
    "clip_grad_norm_",
    "cut_runs",
    "fully_shard_moe",
    "gated_delta_rule",
    "global_token_count",
    "grouped_linear",
    "grouped_swiglu",
    "offload_activations",
    "plan_mesh",
    "plan_placement",
    "plan_sequence",
    "ring_attention",
    "scan_states",
    "state_space",
    "ulysses_attention",
]
