"""Free a trainer's device memory while another program needs the device."""

from .groups import GroupMemory
from .host import HostMemory, MovedBytes

__all__ = ["GroupMemory", "HostMemory", "MovedBytes"]
