"""Running engines: driving several, in turns with a trainer, over HTTP, with adapters."""

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
