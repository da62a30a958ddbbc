"""Crash-safe pages on a local disk: one file of frames of equal size, and an SQLite index."""

from .data import System
from .tier import DiskTier

__all__ = ["DiskTier", "System"]
