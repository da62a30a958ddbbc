"""Experts of transformers behind a token dispatcher."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from ....errors import UnsupportedError
from ...experts.dispatcher import TokenDispatcher
from ...experts.grouped import expert_linear

__all__ = ["experts_of", "install_experts", "routers_of"]

_IMPLEMENTATION = "primeblocks"


def experts_of(model: nn.Module) -> list[Any]:
    """The modules that transformers' registry of experts implementations serves.

    Raises:
        UnsupportedError: PEFT wraps one, to add products to weights that it wants whole.
    """
    for name, module in model.named_modules():
        if hasattr(getattr(module, "base_layer", None), "_apply_gate"):
            raise UnsupportedError(
                f"PEFT adapts {name} by target_parameters, which needs all experts on one rank "
                "(gate_proj, up_proj and down_proj become those, too). Leave them out of its "
                "configuration and call add_expert_lora."
            )
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that score experts, each beside its experts."""
    beside = [m for m in model.modules() if hasattr(getattr(m, "experts", None), "_apply_gate")]
    found = [getattr(module, "gate", getattr(module, "router", None)) for module in beside]
    return [router for router in found if isinstance(router, nn.Module)]


def install_experts(experts: list[Any], dispatcher: TokenDispatcher) -> None:
    """Send the tokens of `experts` through `dispatcher` from now on. Local."""
    ExpertsInterface.register(_IMPLEMENTATION, _forward)
    for module in experts:
        module.config._experts_implementation = _IMPLEMENTATION
        module.dispatcher = dispatcher
        module.grouped_mm = getattr(module, "grouped_mm", None)


def _forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    sent = module.dispatcher.dispatch(
        hidden_states, top_k_weights, top_k_index, num_experts=module.num_experts
    )

    def linear(name: str, rows: Tensor) -> Tensor:
        return expert_linear(module, name, rows, sent.counts)

    if module.has_gate:
        inner = module._apply_gate(linear("gate_up_proj", sent.tokens))
    else:
        inner = module.act_fn(linear("up_proj", sent.tokens))
    return module.dispatcher.combine(linear("down_proj", inner), sent)
