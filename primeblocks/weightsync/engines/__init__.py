"""Engines that share the trainer's device or run LoRA, and a proof that they get the weights."""

from ..verify import prove_round_trip
from .colocated import Colocated, ColocatedEngine, ColocatedTurn, Memory
from .lora import AdapterSpec, adapter_parameters

__all__ = [
    "AdapterSpec",
    "Colocated",
    "ColocatedEngine",
    "ColocatedTurn",
    "Memory",
    "adapter_parameters",
    "prove_round_trip",
]
