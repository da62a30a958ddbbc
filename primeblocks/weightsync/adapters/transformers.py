"""Names and shapes of transformers 5 checkpoints, as `save_pretrained` writes them.

This adapter records how transformers turns the tensors of a module into checkpoint tensors.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ...errors import MissingPackageError, PlanError, UnsupportedError
from ..convert.conversion import Wiring, record_wiring
from ..manifest import Manifest, describe

try:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion
except ImportError as error:
    raise MissingPackageError("transformers>=5.17", "transformers") from error

__all__ = ["to_checkpoint"]


def to_checkpoint(model: PreTrainedModel, *manifests: Manifest) -> Wiring:
    """Return the wiring from a model's tensors to the tensors of its checkpoint. Local.

    Args:
        model: a sharded or whole model. The values of its weights are not read.
        manifests: the manifests of all ranks, if each rank has only some of the names. The default
            is `describe(model)`.

    Raises:
        UnsupportedError: the model has adapters, or the conversion to a checkpoint drops elements.
        PlanError: the conversion computes with the values of a tensor instead of only moving them,
            or ranks describe a tensor differently. Also raised if the conversion separates float8
            codes from the scales of their tiles, or fails.
    """
    held = manifests or (describe(model),)
    for name in chain.from_iterable(held):
        if "lora_" in name or ".base_layer." in name:
            raise UnsupportedError(
                f"the model has adapters ({name}), which no checkpoint contains. Send adapters "
                "with adapter_parameters, or publish merged weights."
            )
    whole = _unsharded(model)

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            return revert_weight_conversion(whole, tensors)
        except Exception as error:  # transformers may raise anything, for example for scales.
            raise PlanError(
                f"transformers cannot convert the tensors of {type(model).__name__} to a "
                f"checkpoint ({type(error).__name__}: {error}). Publish under the names of the "
                'module, or encode float8 weights with encode_weights(form="simulated").'
            ) from error

    wiring = record_wiring(convert, *held)
    moved = sum(piece.source_box.numel for piece in wiring.pieces)
    every = sum(spec.layout.shard.numel for spec in wiring.sources.values())
    if moved != every:
        raise UnsupportedError(
            f"a checkpoint of {type(model).__name__} has {moved:,} elements, but the model has "
            f"{every:,}. Publish under the module's names, or record_wiring() a conversion of "
            "your own."
        )
    return wiring


def _unsharded(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without memory. transformers looks up class names, which FSDP2 changes."""
    model = getattr(model, "_orig_mod", model)  # As torch.compile wraps it.
    kind: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        whole: PreTrainedModel = kind(deepcopy(model.config))
    # The conversions of the checkpoint from which the model was loaded.
    vars(whole)["_weight_conversions"] = getattr(model, "_weight_conversions", None)
    return whole
