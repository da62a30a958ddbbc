"""vLLM's configuration as on a machine with eight H100 GPUs: a fake platform, for its checks only.

vLLM's own class for CUDA answers what it can; this one answers what would ask a driver or a CUDA
library. Nothing computes. For a process that ends afterwards: vLLM's platform stays what it became.
"""

import importlib
import sys
import types
from typing import Any
from unittest import mock

# What the CUDA path of a configuration imports, and cannot import once the platform is CUDA's.
MODULES = (
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.layers.quantization.fp8",
)


def pretend() -> None:
    """Make vLLM believe in eight H100s, with Triton."""
    import vllm._custom_ops
    import vllm.config.vllm
    from vllm.platforms import current_platform

    for module in MODULES:
        importlib.import_module(module)
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return True

        def is_cumem_allocator_available(self) -> bool:
            return True

    current_platform.__class__ = H100
    vllm.config.vllm.HAS_TRITON = True
    for name in dir(vllm._custom_ops):
        if name.startswith("cutlass") and "support" in name:
            mock.patch.object(vllm._custom_ops, name, return_value=True).start()
