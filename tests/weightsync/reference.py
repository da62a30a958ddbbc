"""The right result in the simple way: gather whole tensors, then slice them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from primeblocks.errors import PlanError
from primeblocks.weightsync.manifest import Manifest

__all__ = ["gather_whole", "slice_again"]


def gather_whole(
    sources: Sequence[Manifest], parts: Sequence[Mapping[str, Tensor]], target: Manifest
) -> dict[str, Tensor]:
    """Return whole target tensors from every rank's local parts, in the target's dtype. Pure.

    Raises:
        PlanError: an element is missing on all ranks.
    """
    whole = {}
    for name, spec in target.items():
        tensor = torch.zeros(spec.shape, dtype=spec.dtype)
        seen = torch.zeros(spec.shape, dtype=torch.bool)
        for source, local in zip(sources, parts, strict=True):
            if name in source:
                box = source[name].layout.shard.slices
                tensor[box] = local[name].to(spec.dtype)
                seen[box] = True
        if not seen.all():
            raise PlanError(
                f"{int((~seen).sum())} of {seen.numel()} elements of {name!r} are missing"
            )
        whole[name] = tensor
    return whole


def slice_again(whole: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """Return the parts of whole tensors that a rank with `manifest` holds. Pure."""
    return {
        name: whole[name][spec.layout.shard.slices].to(spec.dtype, copy=True)
        for name, spec in manifest.items()
    }
