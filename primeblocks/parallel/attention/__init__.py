"""Softmax attention over a sequence that ranks share.

An `AttentionKernel` computes the attention. To choose a kernel, pass it as `kernel=`.
"""

from . import dsa
from .context_parallel import ContextParallel
from .dsa import dsa_attention
from .flex import FlexKernel
from .kernel import AttentionKernel, AttentionSpec, Hop
from .latent import latent_ring_attention, latent_ulysses_attention
from .rectangles import RectangleKernel
from .ring import ring_attention
from .ulysses import ulysses_attention
from .varlen import VarlenKernel

__all__ = [
    "AttentionKernel",
    "AttentionSpec",
    "ContextParallel",
    "FlexKernel",
    "Hop",
    "RectangleKernel",
    "VarlenKernel",
    "dsa",
    "dsa_attention",
    "latent_ring_attention",
    "latent_ulysses_attention",
    "ring_attention",
    "ulysses_attention",
]
