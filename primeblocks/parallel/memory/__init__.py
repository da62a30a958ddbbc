"""Free device memory between phases and between steps."""

from .cpu_adamw import CpuAdamW
from .host_memory import HostMemory, MovedBytes

__all__ = ["CpuAdamW", "HostMemory", "MovedBytes"]
