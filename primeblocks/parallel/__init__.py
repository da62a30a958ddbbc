"""Train mixture-of-experts models over many ranks with torch's own FSDP2 and process groups:
degrees are planned and checked as numbers, experts are shared by token dispatch, sequences are
split by a plan, gradients are plain sums that do not depend on how the run is parallelised, and
norms clip across any mix of meshes. Models come in through `adapters`.
"""

from .attention import ring_attention, ulysses_attention
from .experts import (
    AllToAllDispatcher,
    Dispatched,
    GroupedExperts,
    LocalDispatcher,
    OncePerRankDispatcher,
    Placement,
    TokenDispatcher,
    add_expert_lora,
    expert_lora_state_dict,
    grouped_linear,
    grouped_swiglu,
    merged_expert_weights,
    plan_placement,
)
from .fsdp import clip_grad_norm_, fully_shard_moe, global_token_count
from .linear import causal_conv1d, cut_runs, gated_delta_rule, scan_states, state_space
from .memory import CpuAdamW, HostMemory, MovedBytes, OffloadedBytes, offload_activations
from .mesh import Meshes, MeshPlan, plan_mesh
from .sequence import Run, SequencePlan, plan_sequence
from .traffic import StepSizes, Traffic, plan_traffic

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
    "StepSizes",
    "TokenDispatcher",
    "Traffic",
    "add_expert_lora",
    "causal_conv1d",
    "clip_grad_norm_",
    "cut_runs",
    "expert_lora_state_dict",
    "fully_shard_moe",
    "gated_delta_rule",
    "global_token_count",
    "grouped_linear",
    "grouped_swiglu",
    "merged_expert_weights",
    "offload_activations",
    "plan_mesh",
    "plan_placement",
    "plan_sequence",
    "plan_traffic",
    "ring_attention",
    "scan_states",
    "state_space",
    "ulysses_attention",
]
