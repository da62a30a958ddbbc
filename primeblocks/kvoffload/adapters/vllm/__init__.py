"""vLLM 0.32 and 0.33: a `TieredStore` as a secondary tier of vLLM's offloading connector.

vLLM moves pages ("blocks") from the device into a primary pool in host memory. Our tier shares this
pool with vLLM, and copies pages into our store and back. On CUDA, vLLM's own copy worker is used.
On the CPU platform, vLLM's copy worker refuses to start, and our copy worker replaces it.

vLLM 0.32 was run. vLLM 0.33 has no build for CPUs, and its engine was never run. The scheduler,
manager and connector of vLLM 0.33 were run only as Python code, without an engine.
"""

import logging

from ....errors import UnsupportedError, needs

with needs("vllm", extra="vllm"):
    import vllm

if not vllm.__version__.startswith(("0.32.", "0.33.")):
    raise UnsupportedError(
        "primeblocks.kvoffload was tested with vLLM 0.32, and compared with vLLM 0.33 without an "
        f"engine; found {vllm.__version__}. vLLM's offloading interface changes between releases. "
        "Install vllm==0.32.*."
    )
if vllm.__version__.startswith("0.33."):
    logging.getLogger(__name__).warning(
        "primeblocks.kvoffload was compared with vLLM 0.33, but engines of 0.33 were never run. "
        "Engines of vllm==0.32.* were tested."
    )

from .engine import EngineStatistics, command_line, engine_args, engine_statistics, server_args
from .spec import StoreOffloadingSpec
from .tier import StoreTier, request_args

__all__ = [
    "EngineStatistics",
    "StoreOffloadingSpec",
    "StoreTier",
    "command_line",
    "engine_args",
    "engine_statistics",
    "request_args",
    "server_args",
]
