"""Names and shapes of checkpoints of transformers 5, as its own `save_pretrained` makes them.

transformers keeps the way from a module to its checkpoint as reversible transforms, by family. They
run here on tensors without memory; where each result lies in its source says what moved.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ...errors import MissingPackageError, UnsupportedError
from ..convert.conversion import Wiring, record_wiring
from ..manifest import Manifest, describe

try:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion
except ImportError as error:
    raise MissingPackageError("transformers>=5.17", "transformers") from error

__all__ = ["to_checkpoint"]


def to_checkpoint(model: PreTrainedModel, *manifests: Manifest) -> Wiring:
    """Work out the way from a module's tensors to the checkpoint that it would write. Local.

    Elements are moved, never computed, so that shards of any layout can take it.

    Args:
        model: sharded or not; only its class and its configuration are looked at.
        manifests: those of all ranks, where each has only some of the names. Without any, it is
            what `describe` says of `model`.

    Raises:
        UnsupportedError: transformers drops elements.
        PlanError: transformers computes a tensor; or ranks describe one differently.
    """
    whole = _unsharded(model)
    wiring = record_wiring(
        lambda tensors: revert_weight_conversion(whole, tensors), *(manifests or [describe(model)])
    )
    moved = sum(piece.source_box.numel for piece in wiring.pieces)
    every = sum(spec.layout.shard.numel for spec in wiring.sources.values())
    if moved != every:
        raise UnsupportedError(
            f"a checkpoint of {type(model).__name__} has {moved:,} elements of {every:,}. "
            "Publish under the module's names, or record_wiring() of a conversion of yours."
        )
    return wiring


def _unsharded(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without memory: transformers goes by class names, which FSDP2 changes."""
    kind: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        whole: PreTrainedModel = kind(deepcopy(model.config))
    # Of the checkpoint that it was loaded from.
    vars(whole)["_weight_conversions"] = getattr(model, "_weight_conversions", None)
    return whole
