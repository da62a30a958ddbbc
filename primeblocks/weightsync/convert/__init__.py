"""Conversion between the names and shapes that trainer, checkpoint and engine give weights."""

from ..manifest import Manifest, gather_manifests
from .conversion import Wiring
from .pieces import Piece
from .quantize import Quantize
from .recorded import Reads, record_reads, record_wiring

__all__ = [
    "Manifest",
    "Piece",
    "Quantize",
    "Reads",
    "Wiring",
    "gather_manifests",
    "record_reads",
    "record_wiring",
]
