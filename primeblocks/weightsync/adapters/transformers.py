"""Names and shapes of checkpoints of transformers 5, as its own `save_pretrained` makes them.

transformers keeps the way from a module to its checkpoint as reversible transforms, by family. They
run here on tensors without memory; where each result lies in its source says what moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import MissingPackageError, UnsupportedError
from ...layout import Shard
from ..convert.conversion import Wiring, union
from ..convert.forms import box_of
from ..convert.pieces import NEW, Piece
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
        UnsupportedError: transformers computes a tensor, joins several or drops some.
        PlanError: ranks describe a tensor differently.
    """
    sources = union(manifests or [describe(model)])
    bare = {
        name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for name, spec in sources.items()
    }
    with _Aliases():
        written = revert_weight_conversion(_unsharded(model), bare)
    names = {tensor.untyped_storage(): name for name, tensor in bare.items()}
    pieces = tuple(
        piece for name, tensor in written.items() if (piece := _piece(name, tensor, names, bare))
    )
    moved = sum(piece.source_box.numel for piece in pieces)
    every = sum(spec.layout.shard.numel for spec in sources.values())
    if moved != every:
        raise UnsupportedError(
            f"a checkpoint of {type(model).__name__} has {moved:,} elements of {every:,}. "
            "Publish under the module's names, or write a Conversion."
        )
    return Wiring(sources, Manifest(describe(written).tensors, sources.recipe), pieces)


class _Aliases(TorchDispatchMode):
    """Let `contiguous` and `clone` return views, so that a result stays in its source."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if func is torch.ops.aten._unsafe_view.default:  # Of a clone that was needed: no view.
            return args[0].new_empty(args[1])
        return func(*args, **(kwargs or {}))


def _unsharded(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without memory: transformers goes by class names, which FSDP2 changes."""
    kind: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        whole: PreTrainedModel = kind(deepcopy(model.config))
    # Of the checkpoint that it was loaded from.
    vars(whole)["_weight_conversions"] = getattr(model, "_weight_conversions", None)
    return whole


def _piece(
    name: str, tensor: Tensor, names: Mapping[Any, str], bare: Mapping[str, Tensor]
) -> Piece | None:
    """Return the box of a source that a result is; None of an empty one."""
    source = names.get(tensor.untyped_storage())
    if source is None or tensor.dtype != bare[source].dtype:
        raise UnsupportedError(
            f"transformers computes {name!r} as it writes a checkpoint. Publish under the module's "
            "names, or write a Conversion."
        )
    if not tensor.numel():
        return None
    whole, target = bare[source], box_of(tuple(tensor.shape))
    if tensor.shape == whole.shape and tensor.stride() == whole.stride():
        return Piece(source, target, name, target, tuple(range(whole.ndim)))
    offsets, left = [], tensor.storage_offset()
    for stride in whole.stride():
        offsets.append(left // stride)
        left %= stride
    # Strides of dims that are longer than 1 differ.
    at = {whole.stride(dim): dim for dim in range(whole.ndim) if whole.shape[dim] > 1}
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    dims = tuple(at[stride] if size > 1 else NEW for stride, size in strides)
    sizes = [tensor.shape[dims.index(dim)] if dim in dims else 1 for dim in range(whole.ndim)]
    return Piece(source, Shard(tuple(offsets), tuple(sizes)), name, target, dims)
