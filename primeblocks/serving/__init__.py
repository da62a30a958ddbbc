"""Several engines behind one `generate`: pure routes, and a fleet that follows a route."""

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
