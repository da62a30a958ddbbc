"""The digest of a bucket, from the same bytes on both sides."""

from __future__ import annotations

import hashlib
from math import prod

import torch
from jaxtyping import UInt8
from torch import Tensor

from .plan import Bucket, Copy, Plan

__all__ = ["BucketDigest", "bucket_digest", "copy_view", "tensor_view"]

# SHA-256: 1.3 GiB/s with the SHA instructions that server CPUs have had since 2019, against
# 0.7 for BLAKE2b (measured, one core of an AMD EPYC).


class BucketDigest:
    """Running digest over the pieces of one bucket, in the order of its copies."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, piece: Tensor) -> None:
        """Add a piece: its bytes in C order, whatever its strides are."""
        self._hash.update(piece.contiguous().view(-1).view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def tensor_view(blob: UInt8[Tensor, " bytes"], plan: Plan, name: str) -> Tensor:
    """The whole target tensor `name` as a view of the blob."""
    spec, start = plan.target[name], plan.offsets[name]
    size = prod(spec.shape) * spec.dtype.itemsize
    return blob[start : start + size].view(spec.dtype).view(spec.shape)


def copy_view(blob: UInt8[Tensor, " bytes"], plan: Plan, copy: Copy) -> Tensor:
    """The box of one copy as a view of the blob."""
    return tensor_view(blob, plan, copy.name)[copy.box.slices]


def bucket_digest(blob: UInt8[Tensor, " bytes"], plan: Plan, bucket: Bucket) -> str:
    """What arrived for a bucket."""
    digest = BucketDigest()
    for copy in bucket.copies:
        digest.update(copy_view(blob, plan, copy))
    return digest.hexdigest()
