"""Helpers for tests of distributed reinforcement learning, in this project and in your project.

`ranks` runs a function on several gloo ranks. `tiny_models` makes random mixture-of-experts
checkpoints. `oracles` compares results with references in float64. `strategies` draws inputs for
hypothesis. `faults` simulates faults of clocks, transports and files. Each module is imported at
its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import faults, oracles, ranks, strategies, tiny_models

__all__ = ["faults", "oracles", "ranks", "strategies", "tiny_models"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
