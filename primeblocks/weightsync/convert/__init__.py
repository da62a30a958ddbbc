"""Conversion between the names and shapes that trainer, checkpoint and engine give weights."""

from ..manifest import Manifest, gather_manifests
from . import rules
from .conversion import Conversion, Wiring
from .families import checkpoint_to_vllm
from .pieces import Piece
from .quantize import Quantize
from .recorded import Reads, record_reads

__all__ = [
    "Conversion",
    "Manifest",
    "Piece",
    "Quantize",
    "Reads",
    "Wiring",
    "checkpoint_to_vllm",
    "gather_manifests",
    "record_reads",
    "rules",
]
