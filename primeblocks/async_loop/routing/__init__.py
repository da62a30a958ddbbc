"""Several engines behind one `generate`: routes, which are pure, and the fleet that follows one."""

from .fleet import Fleet
from .routes import (
    EngineState,
    PrefixAndLoad,
    Request,
    Route,
    consistent_hash,
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
    "least_loaded",
    "round_robin",
]
