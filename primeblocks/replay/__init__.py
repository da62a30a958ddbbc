"""Replay an engine's expert choices in the trainer.

`record` records the choices of routers. `Routes` stores choices, and can be sliced, joined and
packed. With `impose`, the routers of another model follow recorded choices. By default, these
routers compute their own gate weights, with gradients. With `follow`, you pass recorded choices as
an argument of the forward, for example in pipelines.
`KeptTokens` stores the vocabulary ids that top-k and top-p kept. `measure_mismatch` and `compare`
measure the mismatch of engine and trainer, and `attribute` finds the causes of the mismatch.
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
