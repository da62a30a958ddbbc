"""Weight updates of expert layers on vLLM's CPU platform."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..patch import Patch, SelfTest, ours, stock

__all__ = ["PATCH"]

_SETUP = (
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
    "UnquantizedFusedMoEMethod._setup_kernel"
)


def _setup_kernel(stock_setup: Callable[..., None]) -> Callable[..., None]:
    def setup_kernel(method: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_update = method.moe_kernel is not None
        stock_setup(method, layer=layer, w13=w13, w2=w2)
        if is_update:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


def _test_moe_reload() -> SelfTest:
    """Send raw weights through an update of one tiny layer, with vLLM's own packing kernel."""
    import torch
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as methods
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    raw = torch.arange(2 * 64 * 32, dtype=torch.float32).reshape(2, 64, 32)
    experts: Any = object.__new__(CPUUnquantizedExperts)
    experts.moe_config = SimpleNamespace(
        intermediate_size_per_partition=32, activation=MoEActivation.SILU
    )

    def layer() -> Any:
        module: Any = torch.nn.Module()
        module.w13_weight = torch.nn.Parameter(raw.clone(), requires_grad=False)
        module.w2_weight = torch.nn.Parameter(raw[:, :32].clone(), requires_grad=False)
        module.moe_config = None
        return module

    def updated(setup: Callable[..., None]) -> torch.Tensor:
        method: Any = object.__new__(methods.UnquantizedFusedMoEMethod)
        method.unquantized_backend = methods.UnquantizedMoeBackend.CPU
        method.moe_kernel = SimpleNamespace(fused_experts=experts)
        module = layer()
        setup(method, module, module.w13_weight, module.w2_weight)
        return module.w13_weight

    packed = layer()
    experts.process_weights_after_loading(packed)
    return SelfTest(
        needed=not torch.equal(updated(stock(_SETUP)), packed.w13_weight),
        effective=torch.equal(updated(ours(_SETUP)), packed.w13_weight),
    )


def _is_in_training(config: Any) -> bool:
    """Whether an engine uses a block of primeblocks, so that its weights will change."""
    from ...weightsync.adapters.vllm import BACKEND

    transfer, pages = config.weight_transfer_config, config.kv_transfer_config
    return (
        (transfer is not None and transfer.backend == BACKEND)
        or config.aux_output_config.enabled
        or (pages is not None and "primeblocks." in str(pages.kv_connector_extra_config))
    )


PATCH = Patch(
    name="moe_reload_on_cpu",
    reason="Expert weights are packed for the CPU kernel on the first load only, so every weight "
    "update, even to the same values, silently corrupts all experts.",
    tested="vllm==0.32.*",
    replacements={_SETUP: _setup_kernel},
    self_test=_test_moe_reload,
    asked=_is_in_training,
)
