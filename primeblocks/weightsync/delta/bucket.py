"""A packed bucket as a delta: for each run of elements of one size, its changes or all of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError, ShapeError
from ..digest import as_buffer
from ..plan import Bucket, Plan
from .tensors import apply_delta, encode_delta

__all__ = ["apply_payload", "encode_payload"]

_HEAD = struct.Struct("<BQ")
_FULL, _DELTA = 0, 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def encode_payload(
    plan: Plan, index: int, new: UInt8[Tensor, " bytes"], old: UInt8[Tensor, " bytes"]
) -> bytes | None:
    """Return the delta from `old` to `new`, or None where that is no fewer bytes. Local."""
    parts = []
    for span, dtype in _runs(plan, plan.buckets[index]):
        after, before = new[span].view(dtype), old[span].view(dtype)
        delta = encode_delta(after, before)
        kind, body = (_FULL, as_buffer(new[span]).tobytes()) if delta is None else (_DELTA, delta)
        parts += [_HEAD.pack(kind, len(body)), body]
    size = sum(len(part) for part in parts)
    return b"".join(parts) if size < len(new) else None


def apply_payload(
    plan: Plan, index: int, buffer: UInt8[Tensor, " bytes"], payload: memoryview
) -> None:
    """Overwrite a packed bucket with what changed. Local; idempotent.

    Raises:
        CorruptionError: the payload is not what was written.
    """
    at = 0
    for span, dtype in _runs(plan, plan.buckets[index]):
        if len(payload) < at + _HEAD.size:
            raise CorruptionError(f"the delta of bucket {index} ends after {len(payload)} bytes")
        kind, size = _HEAD.unpack_from(payload, at)
        body = payload[at + _HEAD.size : at + _HEAD.size + size]
        at += _HEAD.size + size
        target = buffer[span]
        if kind == _DELTA:
            try:
                apply_delta(target.view(dtype), body)
            except ShapeError as error:
                raise CorruptionError(f"a delta is not of bucket {index}: {error}") from error
        elif kind == _FULL and len(body) == len(target):
            target.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        else:
            raise CorruptionError(
                f"{len(body)} bytes of kind {kind} in the delta of bucket {index}"
            )
    if at != len(payload):
        raise CorruptionError(f"{len(payload)} bytes in the delta of bucket {index}, {at} expected")


def _runs(plan: Plan, bucket: Bucket) -> Iterator[tuple[slice, torch.dtype]]:
    """Yield runs of elements of one size; 8 bytes count as twice 4, and 16 as four times."""
    start, end, width = 0, 0, 0
    for copy in bucket.copies:
        wide = plan.target[copy.name].dtype.itemsize
        if wide != width and end > start:
            yield slice(start, end), _WORDS[width]
            start = end
        width, end = wide, copy.offset + copy.bytes
    yield slice(start, end), _WORDS[width]
