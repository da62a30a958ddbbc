"""Experts of transformers behind a token dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from ....errors import PlanError, UnsupportedError
from ....groups import settle
from ...experts.all_to_all import AllToAllDispatcher, OncePerRankDispatcher
from ...experts.dispatcher import TokenDispatcher
from ...experts.grouped import expert_linear
from ...experts.placement import Placement
from ...mesh import Meshes

__all__ = ["experts_of", "install_experts", "place_experts", "routers_of"]

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


def install_experts(model: nn.Module, dispatcher: TokenDispatcher) -> None:
    """Send the tokens of all experts through `dispatcher` from now on. Local."""
    experts = experts_of(model)
    ExpertsInterface.register(_IMPLEMENTATION, _forward)
    for module in experts:
        module.config._experts_implementation = _IMPLEMENTATION
        module.dispatcher = dispatcher
        module.grouped_mm = getattr(module, "grouped_mm", None)
        module.placed, module.shared = None, None
    if isinstance(dispatcher, AllToAllDispatcher | OncePerRankDispatcher):
        for block in model.modules():
            routed: Any = getattr(block, "experts", None)
            shared = getattr(block, "shared_experts", None)
            if routed in experts and isinstance(shared, nn.Module):
                routed.shared = _SharedExperts(block, shared)


class _SharedExperts:
    """The shared experts of a block, computed while its rows travel to the others.

    transformers calls them when all results are back, and has no hook to do so earlier: their
    forward is replaced by one that returns what was computed meanwhile. Where the block calls them
    first (AFMoE, Laguna), or with something else than its input, it computes as before.
    """

    def __init__(self, block: nn.Module, shared: nn.Module) -> None:
        self._own, self._given, self._found = shared.forward, None, None
        block.register_forward_pre_hook(self._enter)
        # After an error too: a checkpoint stops recomputing by one.
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


def place_experts(
    model: nn.Module, placements: Sequence[Placement | None], *, meshes: Meshes
) -> None:
    """Give hot experts copies in a model that was parallelized, from its next forward on.

    Parameters stay where they are: each forward fetches the copies, each backward sums their
    gradients on the owner. Results do not change. Call it again with newer loads, or with None for
    layers without copies. Collective, over the ranks that share the experts.

    Args:
        placements: one for each layer of experts, in their order, made by `plan_placement`.

    Raises:
        PlanError: a plan for other numbers of layers, ranks or experts, or not equal on all ranks.
        RankError: another rank refused its plans.
    """
    group, experts = meshes.expert.get_group(), experts_of(model)

    def look() -> dict[str, object]:
        if len(placements) != len(experts):
            raise PlanError(
                f"{len(placements)} placements for {len(experts)} layers of experts. Pass one a "
                "layer, None for a layer without copies."
            )
        for layer, (plan, module) in enumerate(zip(placements, experts, strict=True)):
            if plan is not None and (plan.ranks, plan.num_experts) != (
                group.size(),
                module.num_experts,
            ):
                raise PlanError(
                    f"the placement of layer {layer} is for {plan.num_experts} experts on "
                    f"{plan.ranks} ranks; it has {module.num_experts} on {group.size()}."
                )
        held = [plan and plan.logical_of_physical for plan in placements]
        return {"placements": hash(tuple(held))}

    settle("place_experts", look, *model.parameters(), group=group, check=True)
    for plan, module in zip(placements, experts, strict=True):
        module.placed = plan and (plan, group)


def _forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    num_experts, fetch = module.num_experts, None
    if module.placed is not None:
        placement, group = module.placed
        top_k_index = placement.assign(top_k_index, rank=group.rank(), check=False)
        num_experts = placement.num_physical
        fetch = partial(placement.copies, group=group, check=False)
    meanwhile = {} if module.shared is None else {"meanwhile": module.shared.compute}
    sent = module.dispatcher.dispatch(
        hidden_states, top_k_weights, top_k_index, num_experts=num_experts, **meanwhile
    )

    def linear(name: str, rows: Tensor) -> Tensor:
        return expert_linear(module, name, rows, sent.counts, fetch=fetch)

    if module.has_gate:
        inner = module._apply_gate(linear("gate_up_proj", sent.tokens))
    else:
        inner = module.act_fn(linear("up_proj", sent.tokens))
    return module.dispatcher.combine(linear("down_proj", inner), sent)
