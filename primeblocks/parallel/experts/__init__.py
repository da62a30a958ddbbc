"""Experts that are split over ranks: dispatchers, grouped products and LoRA adapters."""

from .all_to_all import AllToAllDispatcher, OncePerRankDispatcher
from .dispatcher import Dispatched, LocalDispatcher, TokenDispatcher
from .grouped import GroupedExperts, grouped_linear, grouped_swiglu
from .lora import add_expert_lora, expert_lora_state_dict, merged_expert_weights

__all__ = [
    "AllToAllDispatcher",
    "Dispatched",
    "GroupedExperts",
    "LocalDispatcher",
    "OncePerRankDispatcher",
    "TokenDispatcher",
    "add_expert_lora",
    "expert_lora_state_dict",
    "grouped_linear",
    "grouped_swiglu",
    "merged_expert_weights",
]
