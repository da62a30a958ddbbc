"""The bytes of a delta, little-endian:

    header    "PBWD", format version (u8), bytes an element (u8), 0 (u16), elements (u64)
    counts    u32 [segments, layers]
    streams   for each segment of 2**24 elements, for each layer: where, then which bits
    digest    xxh3-128 of all before

The first layer says which elements changed, and their low bits; the next one which of *those*
changed beyond, and their next bits; and so on up to the whole element.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from ...errors import CorruptionError, UnsupportedError
from .code import (
    bits_bytes,
    pack_bits,
    pack_positions,
    positions_bytes,
    unpack_bits,
    unpack_positions,
)
from .scan import Entries

__all__ = [
    "ITEMSIZES",
    "Bytes",
    "Opened",
    "open_delta",
    "read_segments",
    "seal_delta",
    "segments",
]

Bytes = bytes | bytearray | memoryview

_HEADER = struct.Struct("<4sBBHQ")
_KIND, _FORMAT, _DIGEST_BYTES = b"PBWD", 2, 16
_SEGMENT = 1 << 24
# Up to which bit each layer writes: one step in the last place carries out of the low 4 bits in one
# case of 16.
_LAYERS = {1: (4, 8), 2: (4, 8, 16), 4: (4, 8, 16, 32)}

ITEMSIZES = tuple(_LAYERS)
"""Bytes an element may have."""


class Opened(NamedTuple):
    """A delta whose digest and lengths are right.

    Args:
        counts: `[segments, layers]`.
    """

    itemsize: int
    numel: int
    counts: np.ndarray
    streams: memoryview


def segments(numel: int) -> list[slice]:
    """Return the slices that are coded one at a time."""
    return [slice(at, min(at + _SEGMENT, numel)) for at in range(0, numel, _SEGMENT)]


def seal_delta(itemsize: int, numel: int, parts: Iterable[Entries]) -> bytes | None:
    """Return the entries of each segment as bytes, or None where the tensor is no more bytes."""
    layers, spans = _LAYERS[itemsize], segments(numel)
    counts = np.zeros((len(spans), len(layers)), dtype="<u4")
    left = numel * itemsize - _HEADER.size - counts.nbytes - _DIGEST_BYTES
    streams: list[bytes] = []
    for row, span, entries in zip(counts, spans, parts, strict=True):
        for layer, (count, coded) in enumerate(_code(entries, span.stop - span.start, layers)):
            row[layer] = count
            streams.append(coded)
            left -= len(coded)
        if left <= 0:
            return None
    if left <= 0:
        return None
    head = _HEADER.pack(_KIND, _FORMAT, itemsize, 0, numel)
    body = b"".join([head, counts.tobytes(), *streams])
    return body + xxhash.xxh3_128_digest(body)


def open_delta(delta: Bytes) -> Opened:
    """Check everything that can be checked without decoding. Reads every byte once.

    Raises:
        CorruptionError: a byte was changed, added or lost; or the bytes are no delta.
        UnsupportedError: another version of the format.
    """
    view = memoryview(delta).cast("B")
    body, digest = view[:-_DIGEST_BYTES], view[-_DIGEST_BYTES:]
    if len(body) < _HEADER.size or xxhash.xxh3_128_digest(body) != digest:
        raise CorruptionError(
            f"the digest of a delta of {len(view)} bytes does not match: bytes were changed, added"
            " or lost. Fetch it again, or the tensor in full."
        )
    kind, found, itemsize, _, numel = _HEADER.unpack_from(body)
    if kind != _KIND:
        raise CorruptionError(f"these bytes are {kind!r}, not a delta")
    if found != _FORMAT:
        raise UnsupportedError(
            f"a delta of format version {found}; this primeblocks reads version {_FORMAT}."
            " Encode and apply with the same release."
        )
    layers = _LAYERS.get(itemsize, ())
    start = _HEADER.size + -(-numel // _SEGMENT) * len(layers) * 4
    if not layers or start > len(body):
        raise CorruptionError(
            f"{len(view)} bytes are no delta of {numel} elements of {itemsize} bytes"
        )
    counts = np.frombuffer(body[_HEADER.size : start], dtype="<u4").reshape(-1, len(layers))
    opened = Opened(itemsize, numel, counts, body[start:])
    expected = sum(sum(lengths) for _, lengths in _lengths(opened))
    if expected != len(opened.streams):
        raise CorruptionError(f"streams of {len(opened.streams)} bytes where {expected} belong")
    return opened


def read_segments(opened: Opened) -> Iterator[Entries]:
    """Yield the entries of each segment.

    Raises:
        CorruptionError: there are more or fewer positions than announced, or some lie outside. No
            accident does that: the digest was right.
    """
    at = 0
    for (universe, lengths), counts in zip(_lengths(opened), opened.counts.tolist(), strict=True):
        streams = []
        for length in lengths:
            streams.append(opened.streams[at : at + length])
            at += length
        yield _decode(streams, counts, universe, opened.itemsize)


def _lengths(opened: Opened) -> Iterator[tuple[int, list[int]]]:
    """Yield the elements of each segment, and the bytes of its streams."""
    for span, counts in zip(segments(opened.numel), opened.counts.tolist(), strict=True):
        universe, done = span.stop - span.start, 0
        lengths = []
        for count, upto in zip(counts, _LAYERS[opened.itemsize], strict=True):
            lengths += [positions_bytes(count, universe), bits_bytes(count, upto - done)]
            universe, done = count, upto
        yield span.stop - span.start, lengths


def _code(entries: Entries, universe: int, layers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the number of entries of each layer of a segment, and its two streams."""
    where, bits, mask = entries
    done = 0
    for upto in layers:
        yield len(where), pack_positions(where, universe) + pack_bits(bits >> done, upto - done)
        # The next layer's positions count the entries of this one.
        universe, done = len(where), upto
        where = (mask >= 1 << upto).nonzero()[0] if upto < layers[-1] else where[:0]
        bits, mask = bits[where], mask[where]


def _decode(streams: list[memoryview], counts: list[int], universe: int, itemsize: int) -> Entries:
    dtype = np.dtype(f"u{itemsize}")
    layers = _LAYERS[itemsize]
    bits, mask = (np.zeros(counts[0], dtype=dtype) for _ in range(2))
    positions = unpack_positions(streams[0], counts[0], universe)
    at: np.ndarray | slice = slice(None)
    done = 0
    for index, (count, upto) in enumerate(zip(counts, layers, strict=True)):
        if index:
            inner = unpack_positions(streams[2 * index], count, counts[index - 1])
            at = inner if isinstance(at, slice) else at[inner]
        bits[at] |= unpack_bits(streams[2 * index + 1], count, upto - done, dtype) << done
        mask[at] = (1 << upto) - 1
        done = upto
    return Entries(positions, bits, mask)
