"""Softmax attention over a sequence that ranks share."""

from .ring import ring_attention
from .ulysses import ulysses_attention

__all__ = ["ring_attention", "ulysses_attention"]
