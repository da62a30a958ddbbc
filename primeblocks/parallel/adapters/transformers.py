"""Mixture-of-experts models of Hugging Face transformers.

The experts run through transformers' own registry of experts implementations
(`ExpertsInterface`); the model's code is not patched.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...errors import MissingPackageError, UnsupportedError
from ..experts import AllToAllDispatcher, TokenDispatcher, grouped_swiglu, local_experts
from ..fsdp import fully_shard_moe
from ..mesh import Meshes

try:
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise MissingPackageError("transformers", "transformers") from error

__all__ = ["parallelize"]

_IMPLEMENTATION = "primeblocks"
# Classes whose gradients a test compares with the model on one rank.
_TESTED = (
    "DeepseekV3Experts",
    "Glm4MoeExperts",
    "MixtralExperts",
    "OlmoeExperts",
    "Qwen3MoeExperts",
)


def parallelize(
    model: PreTrainedModel,
    meshes: Meshes,
    *,
    precision: MixedPrecisionPolicy | None = None,
    dispatcher: TokenDispatcher | None = None,
) -> None:
    """Run a causal language model's experts and FSDP2 over `meshes`, in place.

    Outputs and gradients are those of the model on one rank. Names of parameters stay; the
    parameters become DTensors, so `layout_of` says what each rank holds. Hooks on the router keep
    working: the experts take the ids that the router module returns, whoever put them there.
    Build optimizers afterwards. Local; the model's weights must be equal on all ranks.

    Args:
        model: in full on every rank.
        precision: see `fully_shard_moe`.
        dispatcher: must share experts over `meshes.expert`; default: `AllToAllDispatcher`.

    Raises:
        UnsupportedError: a kind of experts that no test covers, or context > 1.
        PlanError: the expert degree does not divide the experts.
    """
    experts: list[Any] = [module for module in model.modules() if _is_experts(module)]
    names = sorted({type(module).__name__ for module in experts})
    if not experts or not set(names) <= set(_TESTED):
        raise UnsupportedError(
            f"{type(model).__name__} has experts of kind {names or 'none'}; tested are "
            f"{list(_TESTED)}. For others call fully_shard_moe with a forward of your own."
        )
    if dispatcher is None:
        dispatcher = AllToAllDispatcher(meshes.expert.get_group())
    layers: Any = model.base_model.layers
    fully_shard_moe(model, meshes, layers=layers, experts=experts, precision=precision)
    ExpertsInterface.register(_IMPLEMENTATION, _forward)
    for module in experts:
        # A copy: another model may hold the same config.
        module.config = copy.copy(module.config)
        module.config._experts_implementation = _IMPLEMENTATION
        module.dispatcher = dispatcher


def _is_experts(module: nn.Module) -> bool:
    return {"gate_up_proj", "down_proj"} <= {
        name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3
    }


def _forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    dispatcher = module.dispatcher
    sent = dispatcher.dispatch(
        hidden_states, top_k_weights, top_k_index, num_experts=module.num_experts
    )
    y = grouped_swiglu(
        sent.tokens,
        sent.counts,
        local_experts(module.gate_up_proj),
        local_experts(module.down_proj),
        activation=module.act_fn,
    )
    return dispatcher.combine(y, sent)
