"""Conversion of weights between the names and shapes of trainer, checkpoint and engine."""

from ..manifest import Manifest, gather_manifests
from .conversion import Reads, Wiring, record_reads, record_wiring
from .pieces import Piece

__all__ = [
    "Manifest",
    "Piece",
    "Reads",
    "Wiring",
    "gather_manifests",
    "record_reads",
    "record_wiring",
]
