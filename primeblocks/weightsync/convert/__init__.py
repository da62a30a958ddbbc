"""What trainer, checkpoint and engine call the same weights, and how they lie there."""

from . import rules
from .conversion import Conversion, Wiring
from .families import checkpoint_to_vllm, transformers_to_checkpoint
from .pieces import Piece
from .quantize import Quantize

__all__ = [
    "Conversion",
    "Piece",
    "Quantize",
    "Wiring",
    "checkpoint_to_vllm",
    "rules",
    "transformers_to_checkpoint",
]
