"""What surrounds every value on the wire: who it is, how long, and a digest.

Little-endian, in this order:

    header    kind (4 bytes), version (u16), 0 (u16), length of the body (u64)
    body
    digest    xxh3-128 of header and body

XXH3 runs at memory speed, which no checksum of the standard library does: a crc32 of routes
costs several times the copy that it guards. It finds accidents; it is no signature.
Source: https://xxhash.com (XXH3).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from ..errors import CorruptionError, ShapeError, UnsupportedError

__all__ = ["OVERHEAD", "Bytes", "seal", "unseal"]

Bytes = bytes | bytearray | memoryview

_HEADER = struct.Struct("<4sHHQ")
_DIGEST = 16
_CHUNK = 1 << 18
OVERHEAD = _HEADER.size + _DIGEST
"""Bytes around the body."""


def seal(
    kind: bytes, version: int, parts: Sequence[Any], *, into: Bytes | None = None
) -> memoryview:
    """Copy `parts` into one buffer between header and digest. Local; one copy.

    Args:
        kind: four bytes.
        parts: bytes or arrays; arrays are written in C order.
        into: a writable buffer to use instead of a new one; its begin is returned.

    Raises:
        ShapeError: `into` is too small.
    """
    arrays = [_bytes_of(part) for part in parts]
    length = sum(len(array) for array in arrays)
    out = _room(length + OVERHEAD, into)
    digest = xxhash.xxh3_128()
    position = 0
    for array in (_bytes_of(_HEADER.pack(kind, version, 0, length)), *arrays):
        # In pieces that are still in the cache when they are read again.
        for begin in range(0, len(array), _CHUNK):
            piece = array[begin : begin + _CHUNK]
            copied = out[position : position + len(piece)]
            copied[...] = piece
            digest.update(copied.data)
            position += len(piece)
    out[position:] = np.frombuffer(digest.digest(), dtype=np.uint8)
    return out.data


def unseal(payload: Bytes, *, kind: bytes, version: int) -> memoryview:
    """The body: a view. Local; reads every byte once.

    Raises:
        CorruptionError: a byte was changed, added or lost; or the bytes are another kind.
        UnsupportedError: another version of the format.
    """
    buffer = memoryview(payload).cast("B")
    if len(buffer) < OVERHEAD:
        raise CorruptionError(f"{len(buffer)} bytes are cut off: they cannot hold a header")
    if xxhash.xxh3_128_digest(buffer[:-_DIGEST]) != buffer[-_DIGEST:]:
        raise CorruptionError(
            f"the digest of {len(buffer)} bytes does not match: bytes were changed, added or"
            " lost. Fetch them again."
        )
    found, found_version, _, length = _HEADER.unpack_from(buffer)
    if found != kind:
        raise CorruptionError(f"these bytes are {found!r}, not {kind!r}")
    if found_version != version:
        raise UnsupportedError(
            f"{kind!r} of format version {found_version}; this primeblocks reads version"
            f" {version}. Pack and unpack with the same release."
        )
    if length != len(buffer) - OVERHEAD:
        raise CorruptionError(f"{len(buffer)} bytes do not hold a body of {length}")
    return buffer[_HEADER.size : -_DIGEST]


def _bytes_of(part: Any) -> np.ndarray:
    if isinstance(part, np.ndarray):
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return np.frombuffer(part, dtype=np.uint8)


def _room(length: int, into: Bytes | None) -> np.ndarray:
    if into is None:
        # Not bytes: numpy asks for huge pages, and faulting small ones in costs four copies.
        return np.empty(length, dtype=np.uint8)
    room = np.frombuffer(into, dtype=np.uint8)
    if len(room) < length or not room.flags.writeable:
        raise ShapeError(
            f"needs a writable buffer of {length} bytes; got {len(room)} bytes,"
            f" writable: {room.flags.writeable}"
        )
    return room[:length]
