"""Conversion between the names and shapes that trainer, checkpoint and engine give weights."""

from . import rules
from .conversion import Conversion, Wiring
from .families import checkpoint_to_vllm
from .pieces import Piece
from .quantize import Quantize
from .recorded import Reads, record_reads

__all__ = [
    "Conversion",
    "Piece",
    "Quantize",
    "Reads",
    "Wiring",
    "checkpoint_to_vllm",
    "record_reads",
    "rules",
]
