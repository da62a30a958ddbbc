"""vLLM 0.32's asynchronous engine: tokens in; tokens, log-probabilities and versions out.

The environment variables that vLLM reads are the caller's business; docs/async_loop.md says
which ones a CPU needs. The engine is a *spawned* child process, so a script that starts one
needs `if __name__ == "__main__":`.
"""

from ....errors import MissingPackageError

try:
    import vllm  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise
    raise MissingPackageError("vllm", "vllm") from error

from .completion import Completion
from .engine import VllmEngine, base_engine_args
from .parts import generate_in_parts

__all__ = ["Completion", "VllmEngine", "base_engine_args", "generate_in_parts"]
