"""Experts of transformers behind a token dispatcher."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from ....errors import UnsupportedError
from ...experts.all_to_all import AllToAllDispatcher, OncePerRankDispatcher
from ...experts.dispatcher import TokenDispatcher
from ...experts.grouped import expert_linear

__all__ = ["experts_of", "install_experts", "routers_of", "run_experts"]

_IMPLEMENTATION = "primeblocks"


def experts_of(model: nn.Module) -> list[Any]:
    """Return the modules that transformers' registry of experts implementations serves."""
    for name, module in model.named_modules():
        if hasattr(getattr(module, "base_layer", None), "_apply_gate"):
            raise UnsupportedError(
                f"PEFT adapts {name} by target_parameters, which needs all experts on one rank. "
                "PEFT also maps gate_proj, up_proj and down_proj to target_parameters. Leave "
                "these names out of PEFT's configuration, and call add_expert_lora."
            )
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers: modules that score experts, next to the experts."""
    beside = [m for m in model.modules() if hasattr(getattr(m, "experts", None), "_apply_gate")]
    found = [getattr(module, "gate", getattr(module, "router", None)) for module in beside]
    return [router for router in found if isinstance(router, nn.Module)]


def install_experts(model: nn.Module, dispatcher: TokenDispatcher) -> None:
    """Send the tokens of all experts through `dispatcher` from now on. Local."""
    experts = experts_of(model)
    ExpertsInterface.register(_IMPLEMENTATION, run_experts)
    for module in experts:
        module.config._experts_implementation = _IMPLEMENTATION
        module.dispatcher = dispatcher
        module.grouped_mm = getattr(module, "grouped_mm", None)
        module.shared = None
    if isinstance(dispatcher, AllToAllDispatcher | OncePerRankDispatcher):
        for block in model.modules():
            routed: Any = getattr(block, "experts", None)
            shared = getattr(block, "shared_experts", None)
            if routed in experts and isinstance(shared, nn.Module):
                routed.shared = _SharedExperts(block, shared)


class _SharedExperts:
    """The shared experts of a block, computed while the block's rows travel to other experts.

    transformers calls them after all results returned, and has no hook to call them earlier. So
    their forward is replaced, and returns the result computed meanwhile. If the block calls them
    first (AFMoE, Laguna), or with another input than the block's, the original forward runs.
    """

    def __init__(self, block: nn.Module, shared: nn.Module) -> None:
        self._own, self._given, self._found = shared.forward, None, None
        block.register_forward_pre_hook(self._enter)
        # Also after an error, because a checkpoint stops a recomputation by raising an error.
        block.register_forward_hook(self._leave, always_call=True)
        shared.forward = self._forward

    def compute(self) -> None:
        if self._given is not None:
            self._found = self._own(self._given)

    def _forward(self, x: Tensor) -> Tensor:
        given, found = self._given, self._found
        self._given = self._found = None
        return found if found is not None and x is given else self._own(x)

    def _enter(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        self._given, self._found = (args[0] if args else None), None

    def _leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._given = self._found = None


def run_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Send tokens to their experts, run the experts, and return the results. Collective."""
    meanwhile = {} if module.shared is None else {"meanwhile": module.shared.compute}
    sent = module.dispatcher.dispatch(
        hidden_states, top_k_weights, top_k_index, num_experts=module.num_experts, **meanwhile
    )

    def linear(name: str, rows: Tensor) -> Tensor:
        return expert_linear(module, name, rows, sent.counts)

    if module.has_gate:
        inner = module._apply_gate(linear("gate_up_proj", sent.tokens))
    else:
        inner = module.act_fn(linear("up_proj", sent.tokens))
    return module.dispatcher.combine(linear("down_proj", inner), sent)
