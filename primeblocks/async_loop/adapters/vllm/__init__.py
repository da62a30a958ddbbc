"""vLLM 0.32's asynchronous engine, which reads token ids and returns ids, logprobs and versions.

Before you start an engine, set the environment variables that vLLM reads. The page docs/install.md
lists the variables that vLLM needs on a CPU. The engine is a *spawned* child process, so a script
that starts an engine needs `if __name__ == "__main__":`.

This package imports vLLM only when you first use `VllmEngine` or a function of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ....errors import needs
from .completion import Completion

if TYPE_CHECKING:
    from .engine import VllmEngine, base_engine_args
    from .parts import generate_in_parts

__all__ = [
    "Completion",
    "VllmEngine",
    "base_engine_args",
    "generate_in_parts",
]

_OF_VLLM = {
    "VllmEngine": "engine",
    "base_engine_args": "engine",
    "generate_in_parts": "parts",
}


def __getattr__(name: str) -> Any:
    if name not in _OF_VLLM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("vllm", extra="vllm"):
        module = import_module(f".{_OF_VLLM[name]}", __name__)
    return getattr(module, name)
