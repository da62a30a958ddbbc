"""The digest of a bucket, from the same bytes on both sides."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

__all__ = ["BucketDigest", "bucket_digest"]

# XXH3-128: finds any accident, at the speed of memory. It is no defence against an attacker, who
# could write the commit as well as the weights.


class BucketDigest:
    """Running digest over the pieces of one bucket, in the order of its copies."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, piece: Tensor) -> None:
        """Add a piece: its bytes in C order, whatever its strides are."""
        self._hash.update(piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def bucket_digest(pieces: Iterable[Tensor]) -> str:
    """The digest of a bucket's pieces. Local; one pass over them."""
    digest = BucketDigest()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
