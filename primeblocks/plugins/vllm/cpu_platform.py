"""Two repairs of vLLM's CPU platform: AMX, and weight updates of expert layers.

Linux grants Intel's matrix instructions (AMX) to a process on request only. vLLM never asks.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from ..patch import Patch

__all__ = ["AMX", "MOE_RELOAD"]

_INIT = "vllm.v1.worker.cpu_worker:CPUWorker.init_device"
_SETUP = (
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
    "UnquantizedFusedMoEMethod._setup_kernel"
)


def _init_device(stock_init: Callable[[Any], None]) -> Callable[[Any], None]:
    def init_device(worker: Any) -> None:
        # Granted to the whole process, including its later threads. Asking again is harmless.
        if _needs_amx(worker) and not torch.cpu._init_amx():
            raise UnsupportedError(
                "vLLM's kernels for bfloat16 use AMX. This processor has AMX, but Linux did not "
                "grant it (arch_prctl, ARCH_REQ_XCOMP_PERM), so the first token would end the "
                'process by SIGILL. Pass dtype="float32" or "float16", or let the process use '
                "AMX. AMX needs Linux 5.16 or later, no sandbox that filters arch_prctl, and "
                "alternate signal stacks of 11 KiB or more."
            )
        stock_init(worker)

    return init_device


def _needs_amx(config: Any) -> bool:
    """Whether vLLM chooses a kernel that uses AMX. All such kernels take bfloat16."""
    is_bfloat16 = config.model_config.dtype == torch.bfloat16
    return is_bfloat16 and torch.cpu._is_amx_tile_supported()


def _setup_kernel(stock_setup: Callable[..., None]) -> Callable[..., None]:
    def setup_kernel(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_update = method.moe_kernel is not None
        stock_setup(method, layer=layer, w13=w13, w2=w2)
        if is_update:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


def _is_in_training(config: Any) -> bool:
    """Whether an engine uses a block of primeblocks, so that its weights will change."""
    from ...weightsync.adapters.vllm import BACKEND

    transfer, pages = config.weight_transfer_config, config.kv_transfer_config
    return (
        (transfer is not None and transfer.backend == BACKEND)
        or config.aux_output_config.enabled
        or (pages is not None and "primeblocks." in str(pages.kv_connector_extra_config))
    )


AMX = Patch(
    name="amx_on_cpu",
    reason="On processors with AMX the kernels for bfloat16 use it without asking the kernel for "
    "it, so the first token ends the process by SIGILL unless other code has requested AMX.",
    tested="vllm==0.32.*",
    replacements={_INIT: _init_device},
    asked=_needs_amx,
)
MOE_RELOAD = Patch(
    name="moe_reload_on_cpu",
    reason="Expert weights are packed for the CPU kernel on the first load only, so every weight "
    "update, even to the same values, silently corrupts all experts.",
    tested="vllm==0.32.*",
    replacements={_SETUP: _setup_kernel},
    asked=_is_in_training,
)
