"""vLLM 0.32: a `TieredStore` as a secondary tier of its offloading connector.

vLLM moves pages ("blocks") from the device into a primary pool in host memory that it shares
with our tier; the tier copies them into our store and back. On the CPU platform, where vLLM's own
copy worker refuses to start, ours takes its place; on CUDA the stock worker is used.
"""

from ....errors import MissingPackageError, UnsupportedError

try:
    import vllm
except ImportError as error:
    raise MissingPackageError("vllm", "vllm") from error

if not vllm.__version__.startswith("0.32."):
    raise UnsupportedError(
        f"primeblocks.kvoffload was tested with vLLM 0.32; this is {vllm.__version__}. "
        "Its offloading interface changes between releases: install vllm==0.32.*."
    )

from .engine import EngineStatistics, engine_args, engine_statistics, server_args
from .spec import StoreOffloadingSpec
from .stock import OPTIONS, command_line, mooncake, mooncake_settings, multi, native, nixl
from .tier import StoreTier, request_args

__all__ = [
    "OPTIONS",
    "EngineStatistics",
    "StoreOffloadingSpec",
    "StoreTier",
    "command_line",
    "engine_args",
    "engine_statistics",
    "mooncake",
    "mooncake_settings",
    "multi",
    "native",
    "nixl",
    "request_args",
    "server_args",
]
