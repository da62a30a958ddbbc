"""Softmax attention over a sequence that ranks share."""

from . import dsa
from .dsa import dsa_attention
from .ring import ring_attention
from .ulysses import ulysses_attention

__all__ = ["dsa", "dsa_attention", "ring_attention", "ulysses_attention"]
