"""Engines that share a device with the trainer or run LoRA adapters, and a proof of the path."""

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
