"""Pages on a local disk: equal frames in one file, an SQLite index beside it, crash-safe."""

from .data import System
from .tier import DiskTier

__all__ = ["DiskTier", "System"]
