"""Lossless sparse deltas, of one tensor and of a packed bucket.

A delta overwrites the low bits of elements: *the low w bits become b*. So you may apply it twice,
or again after a failure. A delta is small, because an optimizer step moves most weights by one or
two units in the last place. A delta does not record its base, so its sender must send the versions
and a digest of the result. A bucket is sent in stretches of elements of one size. Each stretch is
sent as a delta, or in full if that is smaller.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError, ShapeError, UnsupportedError, UsageError
from ..digest import Digest, as_buffer, bucket_digest
from ..plan import Copy, Plan
from .entries import (
    ITEMSIZES,
    Bits,
    Bytes,
    Entries,
    Opened,
    flat_bits,
    open_delta,
    read_changes,
    read_segments,
    seal_delta,
    segments,
    write_entries,
)

__all__ = ["CHUNK_BYTES", "Chunk", "apply_delta", "apply_payloads", "encode_delta", "take_payload"]

# Elements of one tensor that are compared at a time, and are still in the cache when gathered.
_CHUNK = 1 << 18
# Bytes of a bucket that are compared or written at a time. Each numpy call gives up the lock of the
# interpreter. With fewer bytes, two threads would wait for each other longer than the cache saves.
CHUNK_BYTES = 8 << 20
_HEAD = struct.Struct("<BQ")
_FULL, _DELTA = 0, 1
# Bytes of a dtype -> bytes of an element of a delta. 8 bytes are 2 elements, and 16 bytes are 4.
_WIDTHS = {1: 1, 2: 2, 4: 4, 8: 4, 16: 4}

Chunk = tuple[np.ndarray, np.ndarray]


def encode_delta(new: Tensor, old: Tensor) -> bytes | None:
    """Return the delta that turns `old` into `new`, or None if the delta is not smaller than `new`.

    Compares bit patterns. Local: reads both tensors once. If the tensors are on a device, only
    changed elements are copied to the host. Before you encode the next version, apply the delta to
    `old`.

    Raises:
        ShapeError: shapes or dtypes differ, or a tensor is not contiguous.
        UnsupportedError: elements do not have 1, 2 or 4 bytes, or a tensor is a meta tensor or a
            negated or conjugated view.
        UsageError: the tensors are on different devices.
    """
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ShapeError(
            f"a delta needs equal shapes and dtypes; got {new.dtype} {list(new.shape)} and"
            f" {old.dtype} {list(old.shape)}. Send the tensor in full if its shape changed."
        )
    if new.device != old.device:
        raise UsageError(
            f"new is on {new.device}, but old is on {old.device}. Keep both on one device."
        )
    one, other = _bits_of(new), _bits_of(old)

    def chunks(span: slice) -> Iterator[tuple[Bits, Bits]]:
        for at in range(span.start, span.stop, _CHUNK):
            here = slice(at, min(at + _CHUNK, span.stop))
            yield one[here], other[here]

    numel = new.numel()
    spans = segments(numel)
    return seal_delta(new.itemsize, numel, (read_changes(chunks(span)) for span in spans))


def apply_delta(target: Tensor, delta: Bytes) -> None:
    """Overwrite the changed elements of `target` in place.

    Local. The cost depends on the number of changed elements, and hardly on the size of `target`.
    Idempotent. If `apply_delta` raises an error, `target` is unchanged. If `target` is neither the
    `old` nor the `new` of the delta, the call succeeds, but the result may be wrong. Compare
    versions before the call, and digests after the call.

    Raises:
        CorruptionError: a byte of the delta was changed, added or lost.
        ShapeError: the target differs from the delta in the number or size of elements, or is not
            contiguous.
        UnsupportedError: the delta has an unknown format version, or the target is a meta tensor or
            a negated or conjugated view.
    """
    opened = open_delta(delta)
    if target.itemsize != opened.itemsize or target.numel() != opened.numel:
        raise ShapeError(
            f"the delta is for {opened.numel} elements of {opened.itemsize} bytes, but the target "
            f"has {target.numel()} of {target.itemsize}. Fetch the tensor in full."
        )
    bits = _bits_of(target)
    for span, entries in zip(segments(opened.numel), read_segments(opened), strict=True):
        write_entries(bits[span], entries)


def _bits_of(tensor: Tensor) -> Bits:
    if tensor.is_meta or tensor.is_neg() or tensor.is_conj():
        raise UnsupportedError(
            "a delta needs a tensor whose bits are stored; got a "
            f"{'meta tensor' if tensor.is_meta else 'negated or conjugated view'} of "
            f"{list(tensor.shape)}. Pass the result of resolve_neg() or resolve_conj(), or a "
            "tensor that has memory."
        )
    if tensor.itemsize not in ITEMSIZES:
        raise UnsupportedError(
            f"a delta needs elements of 1, 2 or 4 bytes, not {tensor.dtype}. View them as "
            "torch.int32."
        )
    if not tensor.is_contiguous():
        raise ShapeError(
            f"a delta needs a contiguous tensor; got strides {tensor.stride()} for"
            f" {list(tensor.shape)}. Pass its local shard or .contiguous()."
        )
    return flat_bits(tensor, tensor.itemsize)


def take_payload(
    plan: Plan, index: int, chunks: Iterator[Chunk], old: UInt8[Tensor, " bytes"]
) -> bytearray | None:
    """Overwrite a packed bucket, and return its delta, or None if the delta is not smaller.

    Local. Each chunk is compared and written while it is in the cache.

    Args:
        chunks: pairs of new and old bytes, in the order of the bucket. All are consumed.
        old: the packed bucket.
    """
    parts: list[bytes | memoryview] = []
    stream, at = _Stream(chunks), 0
    for copies, width in _runs(plan, index):
        end = copies[-1].offset + copies[-1].bytes
        numel = (end - at) // width
        rows = (_read(stream, span.stop - span.start, width) for span in segments(numel))
        delta = seal_delta(width, numel, rows)
        for new, place in stream.until(end):  # The rest, if `seal_delta` gave up.
            np.copyto(place, new)
        body = as_buffer(old[at:end]) if delta is None else delta
        parts += [_HEAD.pack(_FULL if delta is None else _DELTA, len(body)), body]
        at = end
    # Writable, because `torch.frombuffer` needs writable bytes.
    return bytearray().join(parts) if sum(map(len, parts)) < at else None


def apply_payloads(
    plan: Plan, index: int, pieces: Sequence[Tensor], payloads: Sequence[memoryview]
) -> str:
    """Apply deltas to a bucket's boxes, in place, and return the digest of the result.

    Local. Idempotent. Each chunk is written and digested while it is in the cache.

    Args:
        pieces: a tensor for each `Copy` of the bucket, with the bytes that the first delta changes.
        payloads: the deltas, oldest first. All digests are checked before the first write.

    Raises:
        CorruptionError: a payload is not as sent. Parts of it may have been written.
    """
    opened = [_open(plan, index, each) for each in payloads]
    are_plain = all(piece.is_contiguous() and piece.device.type == "cpu" for piece in pieces)
    plain = pieces if are_plain else [piece.contiguous() for piece in pieces]
    digest, rest = Digest(), list(plain)
    for (copies, width), parts in zip(_runs(plan, index), zip(*opened, strict=True), strict=True):
        mine, rest = rest[: len(copies)], rest[len(copies) :]
        places = [
            ((copy.offset - copies[0].offset) // width, flat_bits(piece, width))
            for copy, piece in zip(copies, mine, strict=True)
        ]
        _write(parts, places, digest)
    if are_plain:
        return digest.hexdigest()
    for piece, made in zip(pieces, plain, strict=True):
        if made is not piece:
            piece.copy_(made)
    return bucket_digest(plain)


def _read(stream: _Stream, numel: int, width: int) -> Entries:
    chunks = stream.until(stream.at + numel * width)
    pairs = ((new.view(f"u{width}"), old.view(f"u{width}")) for new, old in chunks)
    return read_changes(pairs, update=True)


def _open(plan: Plan, index: int, payload: memoryview) -> list[Opened | np.ndarray]:
    """Return the part of a payload for each stretch of a bucket: a delta, or all elements.

    Raises:
        CorruptionError: the payload is not of this bucket, or its digest is wrong.
    """
    parts: list[Opened | np.ndarray] = []
    is_all, at = len(payload) == plan.buckets[index].bytes, 0
    for copies, width in _runs(plan, index):
        numel = (copies[-1].offset + copies[-1].bytes - copies[0].offset) // width
        kind, size = _FULL, numel * width
        if not is_all:
            if len(payload) < at + _HEAD.size:
                raise CorruptionError(
                    f"the delta of bucket {index} ends after {len(payload)} bytes. Publish again."
                )
            kind, size = _HEAD.unpack_from(payload, at)
            at += _HEAD.size
        body = payload[at : at + size]
        at += size
        if kind == _FULL and len(body) == numel * width:
            parts.append(np.frombuffer(body, dtype=f"u{width}"))
        elif kind == _DELTA:
            parts.append(opened := open_delta(body))
            if (opened.itemsize, opened.numel) != (width, numel):
                raise CorruptionError(
                    f"a delta does not belong to bucket {index}. The delta has {opened.numel} "
                    f"elements of {opened.itemsize} bytes, but the bucket has {numel} of {width}. "
                    "Publish again."
                )
        else:
            raise CorruptionError(
                f"the delta of bucket {index} has {len(body)} bytes of kind {kind}; expected "
                f"{size} bytes of a known kind. Publish again."
            )
    if at != len(payload):
        raise CorruptionError(
            f"the delta of bucket {index} has {len(payload)} bytes; expected {at}. Publish again."
        )
    return parts


def _write(
    parts: Sequence[Opened | np.ndarray], places: Sequence[tuple[int, Bits]], digest: Digest
) -> None:
    """Write the parts of a stretch to its pieces: `places` are (first element, piece)."""
    start, last = places[-1]
    spans = segments(start + len(last))
    for span, *rows in zip(spans, *(_rows(part, spans) for part in parts), strict=True):
        for start, target in places:
            end = min(start + len(target), span.stop)
            step = CHUNK_BYTES // target.itemsize
            for low in range(max(start, span.start), end, step):
                high = min(low + step, end)
                room = target[low - start : high - start]
                for row in rows:
                    _put(room, row, low - span.start, high - span.start)
                if isinstance(room, np.ndarray):
                    digest.update(room.data)


def _rows(part: Opened | np.ndarray, spans: Sequence[slice]) -> Iterator[Entries | np.ndarray]:
    if isinstance(part, np.ndarray):
        return (part[span] for span in spans)
    return read_segments(part)


def _put(room: Bits, row: Entries | np.ndarray, first: int, end: int) -> None:
    """Write the elements `first` to `end` of a segment."""
    if isinstance(row, Entries):
        here = slice(*np.searchsorted(row.positions, (first, end)))
        write_entries(room, Entries(row.positions[here] - first, row.bits[here], row.mask[here]))
    elif isinstance(room, np.ndarray):
        np.copyto(room, row[first:end])
    else:
        room.view(torch.uint8).copy_(torch.from_numpy(row[first:end].view(np.uint8).copy()))


def _runs(plan: Plan, index: int) -> Iterator[tuple[list[Copy], int]]:
    """Yield ranges of `Copy`s with elements of one size, and the element size of their delta."""
    run: list[Copy] = []
    width = 0
    for copy in plan.buckets[index].copies:
        wide = plan.target[copy.name].dtype.itemsize
        if wide != width and run:
            yield run, _WIDTHS[width]
            run = []
        width = wide
        run.append(copy)
    yield run, _WIDTHS[width]


class _Stream:
    """Chunks of new and old bytes, cut at any byte.

    Attributes:
        at: the number of bytes read.
    """

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks, self.at = chunks, 0
        self._rest: Chunk | None = None

    def until(self, end: int) -> Iterator[Chunk]:
        while self.at < end:
            new, old = next(self._chunks) if self._rest is None else self._rest
            size = min(len(new), end - self.at)
            self._rest = (new[size:], old[size:]) if size < len(new) else None
            self.at += size
            yield new[:size], old[:size]
