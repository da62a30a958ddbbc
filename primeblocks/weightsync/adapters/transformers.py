"""Names and shapes of transformers 5 checkpoints, as `save_pretrained` writes them.

This adapter records how transformers turns the tensors of a module into checkpoint tensors.
"""

from __future__ import annotations

from copy import deepcopy
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

_SCALES = "_scale_inv"  # The name of a matrix's scales ends so, as in DeepSeek-V3's checkpoints.


def to_checkpoint(model: PreTrainedModel, *manifests: Manifest) -> Wiring:
    """Return the wiring from a model's tensors to the tensors of its checkpoint. Local.

    Args:
        model: a sharded or whole model. The values of its weights are not read.
        manifests: the manifests of all ranks, if each rank has only some of the names. The default
            is `describe(model)`.

    Raises:
        UnsupportedError: the conversion to a checkpoint drops elements.
        PlanError: the conversion computes with the values of a tensor instead of only moving them,
            or ranks describe a tensor differently. Also raised if the conversion cuts a float8
            matrix inside a tile, or drops a dim of its scales.
    """
    whole = _unsharded(model)
    wiring = record_wiring(
        lambda tensors: revert_weight_conversion(whole, tensors), *(manifests or [describe(model)])
    )
    moved = sum(piece.source_box.numel for piece in wiring.pieces)
    every = sum(spec.layout.shard.numel for spec in wiring.sources.values())
    if moved != every:
        raise UnsupportedError(
            f"a checkpoint of {type(model).__name__} has {moved:,} elements, but the model has "
            f"{every:,}. Publish under the module's names, or record_wiring() a conversion of "
            "your own."
        )
    for name in wiring.sources:
        if name + _SCALES in wiring.sources:
            _check_tiles(name, wiring)
    return wiring


def _check_tiles(name: str, wiring: Wiring) -> None:
    """Raise PlanError unless each converted part of a matrix consists of whole tiles."""
    shape, tiles = (wiring.sources[each].shape for each in (name, name + _SCALES))
    moved, scales = wiring.by_source[name], wiring.by_source[name + _SCALES]
    sides = [_side(*each) for each in zip(shape[-2:], tiles[-2:], strict=True)]
    boxes = [piece.source_box for piece in moved]
    cut = [
        edge
        for dim, side in zip((-2, -1), sides, strict=True)
        for edge in {box.offsets[dim] + size for box in boxes for size in (0, box.sizes[dim])}
        if edge % side and edge != shape[dim]
    ]
    kept = {len(piece.dims) for piece in moved} == {len(piece.dims) for piece in scales}
    if cut or not kept:
        why = f"at {cut[0]}, inside a tile" if cut else "and drops a dim of the scales"
        raise PlanError(
            f"{name}: the conversion to a checkpoint divides {list(shape)} {why} of {sides[0]} x "
            f"{sides[1]}. Publish the weights in bfloat16, or under the module's names."
        )


def _side(size: int, tiles: int) -> int:
    """Return the side of the tiles, a power of two if one fits. One tile covers all of `size`."""
    least = -(-size // tiles)
    power = 1 << (least - 1).bit_length()
    return power if tiles == 1 or -(-size // power) == tiles else least


def _unsharded(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without memory. transformers looks up class names, which FSDP2 changes."""
    kind: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        whole: PreTrainedModel = kind(deepcopy(model.config))
    # The conversions of the checkpoint from which the model was loaded.
    vars(whole)["_weight_conversions"] = getattr(model, "_weight_conversions", None)
    return whole
