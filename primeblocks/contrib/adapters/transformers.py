"""Indexers of Hugging Face transformers models, and copies of their experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import MissingPackageError, PlanError, UnsupportedError
from ...groups import agreed
from ...layout import local_part
from ...parallel import Meshes
from ...parallel.adapters.transformers.experts import experts_of, run_experts
from ..redundant_experts import Placement

try:
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise MissingPackageError("transformers", "transformers") from error

__all__ = ["TransformersIndexer", "indexers", "place_experts"]

_IMPLEMENTATION = "primeblocks_placed"

# Families whose indexer returns places of tokens, `[batch, tokens, k]`.
_INDEXERS = {
    "AXK2Indexer": "axk2",
    "DeepseekV32Indexer": "deepseek_v32",
    "Glm5NextTextIndexer": "glm5_next",
    "GlmMoeDsaIndexer": "glm_moe_dsa",
    "HYV4Indexer": "hy_v4",
}


@dataclass(frozen=True, eq=False)
class TransformersIndexer:
    """An `index_replay.Indexer` of a transformers model."""

    module: nn.Module
    layer_id: int

    def filled(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids in the form that the running attention takes.

        Eager and SDPA attention scatter ids into a mask and cannot take -1. Each -1 becomes an id
        that the row already has, which changes nothing.
        """
        config: Any = self.module.config
        takes = getattr(config, "_attn_implementation", "") not in ("eager", "sdpa")
        if takes or type(self.module).__name__ == "Glm5NextTextIndexer":
            return ids
        return torch.where(ids >= 0, ids, ids[:, :1])


def indexers(model: nn.Module) -> list[TransformersIndexer]:
    """Return every indexer of a transformers model whose selection can be replayed. Local.

    Layers that share another layer's selection have no indexer of their own.

    Raises:
        UnsupportedError: the model has no indexer, or one that does not select tokens.
    """
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not kind.endswith("Indexer"):
            continue
        if kind not in _INDEXERS:
            raise UnsupportedError(
                f"{name} is a {kind}, which does not return places of tokens as those of "
                f"{sorted(_INDEXERS.values())} do. Its selection cannot be replayed."
            )
        layer: Any = module
        found.append(TransformersIndexer(module, int(layer.layer_idx)))
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no indexer: nothing is selected.")
    return found


def place_experts(
    model: nn.Module, placements: Sequence[Placement | None], *, meshes: Meshes
) -> None:
    """Give hot experts copies in a model that was parallelized, from its next forward on.

    Collective over the ranks that share the experts. Parameters stay on their ranks. Each forward
    fetches the copies, and each backward sums their gradients on the owner. Results do not change.
    Call this function again with newer loads. Pass None for layers without copies.

    Args:
        model: a model that `parallelize` was called with.
        placements: one for each layer of experts, in order, made by `plan_placement`.
        meshes: the meshes of the model.

    Raises:
        PlanError: a plan has other numbers of layers, ranks or experts, or ranks pass different
            plans.
        RankError: another rank refused its plans.
    """
    group, experts = meshes.expert.get_group(), experts_of(model)
    with agreed("place_experts", *model.parameters(), group=group) as call:
        if len(placements) != len(experts):
            raise PlanError(
                f"{len(placements)} placements for {len(experts)} layers of experts. Pass one per "
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
        call.facts["placements"] = hash(tuple(held))
    ExpertsInterface.register(_IMPLEMENTATION, _run_placed)
    for plan, module in zip(placements, experts, strict=True):
        module.placed = plan and (plan, group)
        module.config._experts_implementation = _IMPLEMENTATION


class _Copies:
    """A layer's experts, with the weights of this rank's physical experts."""

    def __init__(self, module: Any, placement: Placement, group: dist.ProcessGroup) -> None:
        if module.grouped_mm is not None:
            raise UnsupportedError(
                "copies of experts are multiplied only by torch's product. Leave out the "
                "placement, or the other product, such as one of fp8."
            )
        self._module, self._placement, self._group = module, placement, group
        self.num_experts = placement.num_physical

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not isinstance(found, Tensor):
            return found
        return self._placement.copies(local_part(found), group=self._group, check=False)


def _run_placed(module: Any, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    if module.placed is None:
        return run_experts(module, hidden_states, ids, weights)
    placement, group = module.placed
    physical = placement.assign(ids, rank=group.rank(), check=False)
    return run_experts(_Copies(module, placement, group), hidden_states, physical, weights)
