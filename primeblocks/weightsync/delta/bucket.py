"""A packed bucket as a delta: for each run of elements of one size, its changes or all of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError
from ..digest import Digest, as_buffer, bucket_digest
from ..plan import Copy, Plan
from .format import Opened, open_delta, read_segments, seal_delta, segments
from .scan import CHUNK, Bits, Entries, flat_bits, read_changes, write_entries

__all__ = ["apply_payload", "encode_payload", "take_payload"]

_HEAD = struct.Struct("<BQ")
_FULL, _DELTA = 0, 1
# Bytes of an element by those of the dtype; 8 bytes count as twice 4, and 16 as four times.
_WIDTHS = {1: 1, 2: 2, 4: 4, 8: 4, 16: 4}

Chunk = tuple[np.ndarray, np.ndarray]


def encode_payload(
    plan: Plan, index: int, new: UInt8[Tensor, " bytes"], old: UInt8[Tensor, " bytes"]
) -> bytes | None:
    """Return the delta from `old` to `new`, or None where that is no fewer bytes. Local."""
    chunks = iter([(np.asarray(as_buffer(new)), np.asarray(as_buffer(old)))])
    return _encode(plan, index, chunks, new, update=False)


def take_payload(
    plan: Plan, index: int, chunks: Iterator[Chunk], old: UInt8[Tensor, " bytes"]
) -> bytes | None:
    """Overwrite a packed bucket, and return what changed, or None where that is no fewer bytes.

    Local; each chunk is compared and written while it is in the cache.

    Args:
        chunks: the new bytes beside the old, in the order of the bucket; all are consumed.
    """
    return _encode(plan, index, chunks, old, update=True)


def apply_payload(plan: Plan, index: int, pieces: Sequence[Tensor], payload: memoryview) -> str:
    """Overwrite a bucket's copies with what changed, where they lie, and return their digest.

    Local; idempotent; the bytes are digested while they are in the cache.

    Raises:
        CorruptionError: the payload is not what was written; some of it may be there.
    """
    are_plain = all(piece.is_contiguous() and piece.device.type == "cpu" for piece in pieces)
    plain = pieces if are_plain else [piece.contiguous() for piece in pieces]
    digest = Digest()
    if len(payload) == plan.buckets[index].bytes:
        _copy(plain, payload, digest)
    else:
        _apply(plan, index, plain, payload, digest)
    if are_plain:
        return digest.hexdigest()
    for piece, made in zip(pieces, plain, strict=True):
        if made is not piece:
            piece.copy_(made)
    return bucket_digest(pieces)


def _encode(
    plan: Plan, index: int, chunks: Iterator[Chunk], whole: UInt8[Tensor, " bytes"], *, update: bool
) -> bytes | None:
    """Encode runs. `whole`: the new bytes, once all chunks were read."""
    parts: list[bytes | memoryview] = []
    stream, at = _Stream(chunks), 0
    for copies, width in _runs(plan, index):
        end = copies[-1].offset + copies[-1].bytes
        numel = (end - at) // width
        rows = (
            _read(stream, span.stop - span.start, width, update=update) for span in segments(numel)
        )
        delta = seal_delta(width, numel, rows)
        for new, old in stream.until(end):  # Where it gave up.
            if update:
                np.copyto(old, new)
        body = as_buffer(whole[at:end]) if delta is None else delta
        parts += [_HEAD.pack(_FULL if delta is None else _DELTA, len(body)), body]
        at = end
    return b"".join(parts) if sum(map(len, parts)) < at else None


def _read(stream: _Stream, numel: int, width: int, *, update: bool) -> Entries:
    """Return what changed in the next elements of a stream."""
    found, start = [], stream.at
    for new, old in stream.until(start + numel * width):
        first = (stream.at - start - len(new)) // width
        one, other = (side.view(f"u{width}") for side in (new, old))
        found.append(read_changes(one, other, update=update))
        found[-1].positions[:] += first
    return Entries(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _apply(
    plan: Plan, index: int, pieces: Sequence[Tensor], payload: memoryview, digest: Digest
) -> None:
    at, bucket_at = 0, 0
    rest = list(pieces)
    for copies, width in _runs(plan, index):
        if len(payload) < at + _HEAD.size:
            raise CorruptionError(f"the delta of bucket {index} ends after {len(payload)} bytes")
        kind, size = _HEAD.unpack_from(payload, at)
        body = payload[at + _HEAD.size : at + _HEAD.size + size]
        at += _HEAD.size + size
        mine, rest = rest[: len(copies)], rest[len(copies) :]
        end = copies[-1].offset + copies[-1].bytes
        if kind == _DELTA:
            starts = [(copy.offset - bucket_at) // width for copy in copies]
            places = list(zip(starts, (flat_bits(piece, width) for piece in mine), strict=True))
            _write(_open(index, body, width, (end - bucket_at) // width), places, digest)
        elif kind == _FULL and len(body) == end - bucket_at:
            _copy(mine, body, digest)
        else:
            raise CorruptionError(
                f"{len(body)} bytes of kind {kind} in the delta of bucket {index}"
            )
        bucket_at = end
    if at != len(payload):
        raise CorruptionError(f"{len(payload)} bytes in the delta of bucket {index}, {at} expected")


def _open(index: int, body: memoryview, width: int, numel: int) -> Opened:
    opened = open_delta(body)
    if (opened.itemsize, opened.numel) != (width, numel):
        raise CorruptionError(
            f"a delta is not of bucket {index}: of {opened.numel} elements of {opened.itemsize} "
            f"bytes, where the bucket has {numel} of {width}"
        )
    return opened


def _write(opened: Opened, places: Sequence[tuple[int, Bits]], digest: Digest) -> None:
    """Write the delta of a run to its pieces, each with the place of its first element."""
    spans = segments(opened.numel)
    for span, (positions, bits, mask) in zip(spans, read_segments(opened), strict=True):
        for start, target in places:
            end = min(start + len(target), span.stop)
            for low in range(max(start, span.start), end, CHUNK):
                high, first = min(low + CHUNK, end), low - span.start
                here = slice(*np.searchsorted(positions, (first, high - span.start)))
                entries = Entries(positions[here] - first, bits[here], mask[here])
                room = target[low - start : high - start]
                write_entries(room, entries)
                if isinstance(room, np.ndarray):
                    digest.update(room.data)


def _copy(pieces: Sequence[Tensor], body: memoryview, digest: Digest) -> None:
    at = 0
    for piece in pieces:
        part = body[at : at + piece.nbytes]
        if piece.device.type == "cpu":
            np.copyto(np.asarray(as_buffer(piece)), np.frombuffer(part, dtype=np.uint8))
            digest.update(as_buffer(piece))
        else:
            there = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            piece.view(-1).view(torch.uint8).copy_(there)
        at += piece.nbytes


def _runs(plan: Plan, index: int) -> Iterator[tuple[list[Copy], int]]:
    """Yield runs of copies whose elements have one size, and that size."""
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
    """Chunks of two sides, cut where it is asked for.

    Attributes:
        at: the number of bytes that were read.
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
