"""A fleet of engines behind one `generate`, and routes, which choose an engine per request."""

from .fleet import (
    EngineState,
    Fleet,
    PrefixAndLoad,
    Request,
    Route,
    consistent_hash,
    engines_to_restart,
    least_loaded,
    round_robin,
)

__all__ = [
    "EngineState",
    "Fleet",
    "PrefixAndLoad",
    "Request",
    "Route",
    "consistent_hash",
    "engines_to_restart",
    "least_loaded",
    "round_robin",
]
