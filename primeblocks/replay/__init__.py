"""Replay the expert choices of the engine that sampled the tokens in the trainer that learns
from them. `record` writes a router's choices down, `Routes` carries them (sliced, joined, packed
for the wire), `impose` makes another model's routers follow them while the gate weights and their
gradients stay live, and `measure_mismatch` and `compare` say how far the two sides are apart."""

from .gates import chosen_softmax_gates, sigmoid_gates, softmax_gates
from .impose import impose
from .mismatch import Agreement, Mismatch, TokenMismatch, compare, measure_mismatch
from .record import Tape, record
from .router import Router
from .routes import Routes

__all__ = [
    "Agreement",
    "Mismatch",
    "Router",
    "Routes",
    "Tape",
    "TokenMismatch",
    "chosen_softmax_gates",
    "compare",
    "impose",
    "measure_mismatch",
    "record",
    "sigmoid_gates",
    "softmax_gates",
]
