"""Replay an engine's expert choices in the trainer that learns from its tokens.

`record` writes a router's choices down. `Routes` carries them: sliced, joined, or packed for the
wire. `impose` makes another model's routers follow them, while the gate weights and their gradients
stay live. `follow` does the same by an argument of the forward, for pipelines. `KeptTokens` does it
for top-k and top-p. `measure_mismatch` and `compare` measure the distance of the two sides, and
`attribute` finds its causes.
"""

from . import gates, mismatch, sampling
from .attribution import attribute
from .follow import follow
from .impose import impose
from .mismatch import compare, measure_mismatch
from .record import Tape, record
from .router import Router, allow_compile
from .routes import Routes
from .sampling import KeptTokens

__all__ = [
    "KeptTokens",
    "Router",
    "Routes",
    "Tape",
    "allow_compile",
    "attribute",
    "compare",
    "follow",
    "gates",
    "impose",
    "measure_mismatch",
    "mismatch",
    "record",
    "sampling",
]
