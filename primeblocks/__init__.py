"""Reinforcement-learning building blocks for large mixture-of-experts language models.

The six main blocks are `parallel`, `fp8`, `replay`, `kvoffload`, `weightsync` and `async_loop`.
`losses`, `capture`, `serving` and `exact` are as independent. `planning` uses other blocks.
Importing this package touches no device, configures no logging and loads no optional package. A
block is loaded when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import (
        async_loop,
        capture,
        exact,
        fp8,
        kvoffload,
        losses,
        parallel,
        planning,
        replay,
        serving,
        weightsync,
    )
    from .layout import Layout, Shard

__version__ = "0.2.0"

__all__ = [
    "Layout",
    "Shard",
    "__version__",
    "async_loop",
    "capture",
    "exact",
    "fp8",
    "kvoffload",
    "losses",
    "parallel",
    "planning",
    "replay",
    "serving",
    "weightsync",
]


def __getattr__(name: str) -> Any:
    if name in ("Layout", "Shard"):
        return getattr(import_module(".layout", __name__), name)
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
