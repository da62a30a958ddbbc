"""The digest of a bucket, from the same bytes on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future

import numpy as np
import torch
import xxhash
from torch import Tensor

__all__ = ["as_buffer", "bucket_digest", "cast_and_digest"]

# XXH3-128: finds any accident, at the speed of memory. It is no defence against an attacker, who
# could write the commit as well as the weights.

# Cast, copied and digested while in the cache. Smaller pieces cost more in calls than they save.
_CHUNK_BYTES = 1 << 20


def bucket_digest(pieces: Iterable[Tensor]) -> str:
    """Return the digest of a bucket's pieces: their bytes in C order. Local; one pass over them."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(as_buffer(piece.cpu().contiguous()))
    return digest.hexdigest()


def cast_and_digest(
    sources: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    into: Sequence[Tensor] | None,
    *,
    helper: Executor | None = None,
) -> str:
    """Copy tensors, each cast to its dtype, and return the digest of the copies. Local; one pass.

    Args:
        into: the targets, of the same shapes; None digests alone.
        helper: one thread that digests while this one copies, where bytes are copied as they are.
    """
    digest = xxhash.xxh3_128()
    under_way: list[Future[None]] = []
    targets: Sequence[Tensor | None] = [None] * len(sources) if into is None else into
    for source, dtype, target in zip(sources, dtypes, targets, strict=True):
        if helper is not None and target is not None and _are_plain_bytes(source, target):
            new = as_buffer(source)
            under_way.append(helper.submit(digest.update, new))
            np.asarray(as_buffer(target))[:] = np.asarray(new)
            continue
        _wait_for(under_way)
        for part, room in _chunks(source, target, dtype.itemsize):
            cast = part.to(device="cpu", dtype=dtype).contiguous()
            if room is not None:
                room.copy_(cast)
            digest.update(as_buffer(cast))
    _wait_for(under_way)
    return digest.hexdigest()


def _wait_for(under_way: list[Future[None]]) -> None:
    for future in under_way:
        future.result()
    under_way.clear()


def _are_plain_bytes(source: Tensor, target: Tensor) -> bool:
    return (
        source.dtype == target.dtype
        and source.device.type == target.device.type == "cpu"
        and source.is_contiguous()
        and target.is_contiguous()
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
