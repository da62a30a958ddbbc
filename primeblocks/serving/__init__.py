"""Several engines behind one `generate`: pure routes, and a fleet that follows a route."""

from .fleet import Fleet, engines_to_restart
from .routes import (
    AddedSeconds,
    EngineState,
    PrefixAndLoad,
    Request,
    Route,
    consistent_hash,
    least_loaded,
    round_robin,
)

__all__ = [
    "AddedSeconds",
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
