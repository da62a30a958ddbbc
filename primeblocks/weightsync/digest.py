"""The digest of a bucket, from the same bytes on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import xxhash
from jaxtyping import UInt8
from torch import Tensor

__all__ = ["Digest", "as_buffer", "bucket_digest", "cast_and_digest", "taken"]

# XXH3-128: finds any accident, at the speed of memory. It is no defence against an attacker, who
# could write the commit as well as the weights.
Digest = xxhash.xxh3_128

# Cast, digested and written while in the cache. Smaller pieces cost more in calls than they save.
_CHUNK_BYTES = 1 << 19


def bucket_digest(pieces: Iterable[Tensor]) -> str:
    """Return the digest of a bucket's pieces: their bytes in C order. Local; one pass over them."""
    digest = Digest()
    for piece in pieces:
        digest.update(as_buffer(piece.cpu().contiguous()))
    return digest.hexdigest()


def cast_and_digest(
    sources: Sequence[Tensor], dtypes: Sequence[torch.dtype], into: Sequence[Tensor] | None
) -> str:
    """Copy tensors, each cast to its dtype, and return the digest of the copies. Local; one pass.

    Args:
        into: the targets, of the same shapes; None digests alone.
    """
    digest = Digest()
    targets: Sequence[Tensor | None] = [None] * len(sources) if into is None else into
    for source, dtype, target in zip(sources, dtypes, targets, strict=True):
        for new, room in taken(source, dtype, target, digest):
            np.copyto(room, new)
    return digest.hexdigest()


def taken(
    source: Tensor, dtype: torch.dtype, target: Tensor | None, digest: Digest
) -> Iterator[tuple[UInt8[np.ndarray, " chunk"], UInt8[np.ndarray, " chunk"]]]:
    """Cast and digest a tensor chunk by chunk; yield each one's bytes and the place of its copy.

    A chunk is good until the next, and in the cache. What has no plain place on the host is copied
    here, and not yielded.
    """
    if _are_plain(source, dtype, target):
        new = np.asarray(as_buffer(source))
        room = None if target is None else np.asarray(as_buffer(target))
        for at in range(0, len(new), _CHUNK_BYTES):
            chunk = new[at : at + _CHUNK_BYTES]
            digest.update(chunk.data)
            if room is not None:
                yield chunk, room[at : at + _CHUNK_BYTES]
        return
    for part, place in _chunks(source, target, dtype.itemsize):
        cast = part.to(dtype)  # Where it lies: fewer bytes cross the bus.
        plain = cast.cpu().contiguous()
        new = np.asarray(as_buffer(plain))
        digest.update(new.data)
        if place is None:
            continue
        if place.device.type == "cpu" and place.is_contiguous():
            yield new, np.asarray(as_buffer(place))
        else:
            place.copy_(plain if place.device.type == "cpu" else cast)


def _are_plain(source: Tensor, dtype: torch.dtype, target: Tensor | None) -> bool:
    sides = (source,) if target is None else (source, target)
    return source.dtype == dtype and all(
        side.device.type == "cpu" and side.is_contiguous() for side in sides
    )


def as_buffer(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU. No copy."""
    # Not .numpy(): it forbids resizing the storage ever after, as offloading does.
    plain = tensor.detach() if tensor.requires_grad else tensor
    return np.from_dlpack(plain.view(-1).view(torch.uint8)).data


def _chunks(
    source: Tensor, target: Tensor | None, itemsize: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield parts of both that follow each other in C order."""
    if source.is_contiguous() and (target is None or target.is_contiguous()):
        source = source.view(-1)
        target = None if target is None else target.view(-1)
    if source.ndim == 0 or source.numel() == 0:
        yield source, target
        return
    step = max(1, _CHUNK_BYTES // (source[0].numel() * itemsize))
    for start in range(0, len(source), step):
        end = start + step
        yield source[start:end], None if target is None else target[start:end]
