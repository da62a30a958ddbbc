"""Device memory freed between phases, between steps, and between forward and backward."""

from .activations import OffloadedBytes, offload_activations
from .cpu_adamw import CpuAdamW
from .host_memory import HostMemory, MovedBytes

__all__ = ["CpuAdamW", "HostMemory", "MovedBytes", "OffloadedBytes", "offload_activations"]
