"""Replay the expert choices of the engine that sampled the tokens in the trainer that learns
from them. `record` writes a router's choices down, `Routes` carries them (sliced, joined, packed
for the wire), `RouteStore` keeps them by KV page, and `impose` makes another model's routers follow
them while the gate weights and their gradients stay live. `KeptTokens` does the same for top-k and
top-p. `measure_mismatch` and `compare` say how far the two sides are apart, `attribute` why."""

from .agreement import Agreement, compare
from .attribution import Attribution, Cause, attribute
from .gates import chosen_softmax_gates, sigmoid_gates, softmax_gates
from .impose import Imposed, allow_compile, impose
from .kept import KeptTokens
from .mismatch import Mismatch, TokenMismatch, exact_kl, measure_mismatch
from .pages import StoreStatistics
from .record import Tape, record
from .router import Router
from .routes import Routes
from .sampling import kept_logprobs, kept_tokens
from .store import RouteStore

__all__ = [
    "Agreement",
    "Attribution",
    "Cause",
    "Imposed",
    "KeptTokens",
    "Mismatch",
    "RouteStore",
    "Router",
    "Routes",
    "StoreStatistics",
    "Tape",
    "TokenMismatch",
    "allow_compile",
    "attribute",
    "chosen_softmax_gates",
    "compare",
    "exact_kl",
    "impose",
    "kept_logprobs",
    "kept_tokens",
    "measure_mismatch",
    "record",
    "sigmoid_gates",
    "softmax_gates",
]
