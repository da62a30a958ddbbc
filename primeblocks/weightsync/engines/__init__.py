"""Engines that share a device with the trainer, load folders, or run LoRA adapters."""

from ..verify import prove_round_trip
from .colocated import Colocated, ColocatedEngine, ColocatedTurn, Memory
from .lora import AdapterSpec, adapter_parameters
from .model_folder import ModelFolder, ModelFolders

__all__ = [
    "AdapterSpec",
    "Colocated",
    "ColocatedEngine",
    "ColocatedTurn",
    "Memory",
    "ModelFolder",
    "ModelFolders",
    "adapter_parameters",
    "prove_round_trip",
]
