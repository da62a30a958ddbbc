"""The wire format: an envelope around every value, and the body of routes. Little-endian.

The envelope is:

    header    kind (4 bytes), version (u16), 0 (u16), length of the body (u64)
    body
    digest    xxh3-128 of header and body, which finds accidental changes and is not a signature

The body of routes is:

    sizes      0, top_k, 1 with padding or 0, experts, layers, tokens, start (32 bytes)
    layer ids  uint32 each
    experts    uint8 or uint16, in the router's order
    missing    one bit per token
    padding    one bit per token, if there is padding

Experts unpack without a copy and keep the order of the slots, which bitwise replay needs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import xxhash

from ..errors import CorruptionError, ShapeError, UnsupportedError, UsageError, shown

__all__ = [
    "Bytes",
    "check_mask",
    "checked_experts",
    "checked_ids",
    "decode",
    "encode",
    "expert_dtype",
    "seal",
    "unseal",
]

Bytes = bytes | bytearray | memoryview

_HEADER = struct.Struct("<4sHHQ")
_DIGEST = 16
_CHUNK = 1 << 18
_OVERHEAD = _HEADER.size + _DIGEST  # Bytes around the body.


def seal(kind: bytes, format_version: int, parts: Sequence[Any]) -> memoryview:
    """Copy `parts` into one buffer between header and digest. Local. One copy.

    Args:
        kind: four bytes.
        parts: bytes or arrays. Arrays are written in C order.
    """
    arrays = [_bytes_of(part) for part in parts]
    length = sum(len(array) for array in arrays)
    # An array and not bytes, because numpy asks for huge pages. The page faults of small pages
    # would take as long as four copies.
    out = np.empty(length + _OVERHEAD, dtype=np.uint8)
    digest = xxhash.xxh3_128()
    position = 0
    for array in (_bytes_of(_HEADER.pack(kind, format_version, 0, length)), *arrays):
        # Copy in pieces, so that the digest reads each piece from the cache.
        for begin in range(0, len(array), _CHUNK):
            piece = array[begin : begin + _CHUNK]
            copied = out[position : position + len(piece)]
            copied[...] = piece
            digest.update(copied.data)
            position += len(piece)
    out[position:] = np.frombuffer(digest.digest(), dtype=np.uint8)
    return out.data


def unseal(payload: Bytes, *, kind: bytes, format_version: int) -> memoryview:
    """Return the body as a view. Local. Reads every byte once.

    Raises:
        CorruptionError: a byte was changed, added or lost, or the bytes are of another kind.
        UnsupportedError: the format has another version.
    """
    buffer = memoryview(payload).cast("B")
    if len(buffer) < _OVERHEAD:
        raise CorruptionError(f"{len(buffer)} bytes are too few to contain a header")
    if xxhash.xxh3_128_digest(buffer[:-_DIGEST]) != buffer[-_DIGEST:]:
        raise CorruptionError(
            f"the digest of {len(buffer)} bytes does not match: bytes were changed, added or"
            " lost. Fetch them again."
        )
    found, found_format, _, length = _HEADER.unpack_from(buffer)
    if found != kind:
        raise CorruptionError(f"these bytes are {found!r}, not {kind!r}")
    if found_format != format_version:
        raise UnsupportedError(
            f"the {kind!r} bytes have format version {found_format}, but this primeblocks reads "
            f"version {format_version}. Pack and unpack with the same release."
        )
    if length != len(buffer) - _OVERHEAD:
        raise CorruptionError(f"{len(buffer)} bytes do not contain a body of {length} bytes")
    return buffer[_HEADER.size : -_DIGEST]


def _bytes_of(part: Any) -> np.ndarray:
    if isinstance(part, np.ndarray):
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return np.frombuffer(part, dtype=np.uint8)


_KIND, _FORMAT = b"PBRT", 3
_SIZES = struct.Struct("<IHHIIQQ")
_ROWS = 1 << 15  # Rows compared at a time, so that they stay in the cache.


def expert_dtype(num_experts: int) -> np.dtype:
    """Return uint8 for up to 256 experts, and uint16 for up to 65536.

    Raises:
        ShapeError: `num_experts` is out of this range.
    """
    whole = isinstance(num_experts, Integral) and not isinstance(num_experts, bool)
    if not whole or not 1 <= num_experts <= 1 << 16:
        raise ShapeError(f"num_experts must be in 1..65536; got {shown(num_experts)}")
    return np.dtype("u1" if num_experts <= 256 else "<u2")


def _check_range(experts: np.ndarray, num_experts: int, error: type[Exception]) -> None:
    """Refuse ids outside `0..num_experts - 1`, because on a GPU they would end the process."""
    limits = np.iinfo(experts.dtype)
    above = limits.max >= num_experts and experts.size and experts.max() >= num_experts
    below = limits.min < 0 and experts.size and experts.min() < 0
    if above or below:
        token, layer, slot = np.argwhere((experts >= num_experts) | (experts < 0))[0]
        expert, remedy = experts[token, layer, slot], "Check that the routes belong to this model."
        if expert == -1:
            remedy = "-1 marks a missing token only in follow. Pass missing= instead."
        raise error(
            f"expert {expert} at token {token}, layer position {layer}, slot {slot} is outside "
            f"0..{num_experts - 1}. {remedy}"
        )


def checked_experts(
    array: np.ndarray, num_experts: int, missing: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Check ids and mask. Return ids in `expert_dtype`, with zeros in missing rows. Local.

    Raises:
        ShapeError: as for `expert_dtype` and `Routes.from_array`.
        UsageError: an id is out of range, or a row names an expert twice. The message names the
            first such id or row.
    """
    array = _host_array(array)
    if array.ndim != 3 or array.dtype.kind not in "iu" or not array.shape[2]:
        raise ShapeError(
            "routes need an integer array [tokens, layers, top_k];"
            f" got {array.dtype} {list(array.shape)}"
        )
    missing = np.zeros(len(array), np.bool_) if missing is None else _host_array(missing)
    check_mask("missing", missing, len(array))
    dtype = expert_dtype(num_experts)
    if missing.any():
        array = np.where(missing[:, None, None], 0, array)
    _check_range(array, num_experts, UsageError)
    experts = array.astype(dtype, copy=False)
    tokens, layers, top_k = experts.shape
    rows, twice = experts.reshape(-1, top_k), np.zeros(tokens * layers, dtype=np.bool_)
    for begin in range(0, len(rows), _ROWS):
        columns = rows[begin : begin + _ROWS].T.copy()
        for column in range(1, top_k):
            twice[begin : begin + _ROWS] |= (columns[:column] == columns[column]).any(axis=0)
    found = twice.reshape(tokens, layers) & ~missing[:, None]
    if found.any():
        token, layer = (int(i) for i in np.argwhere(found)[0])
        raise UsageError(
            f"{int(found.sum())} rows name an expert twice. The first is token {token} of layer "
            f"position {layer}: {experts[token, layer].tolist()}. An engine that was compiled "
            "before its capture was bound returns zeros. Run this engine eagerly, and leave out "
            "dense layers."
        )
    return experts, missing


def _host_array(values: Any) -> np.ndarray:
    """Return the values as a numpy array, or raise ShapeError. Local."""
    try:
        return np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError is torch's.
        raise ShapeError(f"routes need arrays in host memory: {error}") from error


def check_mask(name: str, mask: np.ndarray, tokens: int) -> None:
    """Raise ShapeError unless a mask has one bool per token. Local."""
    if mask.shape != (tokens,) or mask.dtype != np.bool_:
        raise ShapeError(f"{name} must be bool [{tokens}]; got {mask.dtype} {list(mask.shape)}")


def checked_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Return layer ids as integers below 2**32, or raise ShapeError. Local."""
    ids = tuple(layer_ids) if isinstance(layer_ids, Iterable) else (None,)
    if not all(isinstance(i, Integral) and 0 <= i < 1 << 32 for i in ids):
        raise ShapeError(f"layer_ids must be indices of layers; got {shown(layer_ids)}")
    return tuple(int(i) for i in ids)


def encode(
    experts: np.ndarray,
    missing: np.ndarray,
    padding: np.ndarray,
    num_experts: int,
    layer_ids: tuple[int, ...],
    *,
    start: int,
) -> memoryview:
    """Write one contiguous buffer. Local. Copies the experts once."""
    tokens, layers, top_k = experts.shape
    padded = bool(padding.any())
    sizes = (0, top_k, padded, num_experts, layers, tokens, start)
    parts = (
        _SIZES.pack(*sizes),
        np.asarray(layer_ids, dtype="<u4"),
        experts,
        np.packbits(missing),
        np.packbits(padding if padded else padding[:0]),
    )
    return seal(_KIND, _FORMAT, parts)


def decode(payload: Bytes) -> tuple[tuple[Any, ...], int]:
    """Read the fields of `Routes`, and `start`. Local. Raises the errors of `unseal`."""
    body = unseal(payload, kind=_KIND, format_version=_FORMAT)
    if len(body) < _SIZES.size:
        raise CorruptionError(f"a body of {len(body)} bytes cannot hold the sizes of routes")
    reserved, top_k, padded, num_experts, layers, tokens, start = _SIZES.unpack_from(body)
    if reserved or not 1 <= top_k <= num_experts <= 1 << 16 or padded > 1:
        raise CorruptionError(
            f"the header of these routes is not valid: reserved bytes {reserved}, top_k {top_k} "
            f"of {num_experts}, padding {padded}"
        )
    dtype = expert_dtype(num_experts)
    length = tokens * layers * top_k * dtype.itemsize
    ids_end = _SIZES.size + 4 * layers
    mask_bytes = (tokens + 7) // 8
    if len(body) != ids_end + length + (1 + padded) * mask_bytes:
        raise CorruptionError(f"{len(body)} bytes do not contain {tokens} x {layers} x {top_k} ids")
    layer_ids = tuple(np.frombuffer(body[_SIZES.size : ids_end], dtype="<u4").tolist())
    if len(set(layer_ids)) != layers:
        raise CorruptionError(f"{layers} layers need as many distinct ids; got {shown(layer_ids)}")
    masks = np.frombuffer(body[ids_end + length :], dtype=np.uint8).reshape(1 + padded, mask_bytes)
    bits = np.unpackbits(masks, axis=1, count=tokens).view(np.bool_)
    missing, padding = bits[0], bits[1] if padded else np.broadcast_to(np.False_, tokens)
    data = body[ids_end : ids_end + length]
    experts = np.frombuffer(data, dtype=dtype).reshape(tokens, layers, top_k)
    _check_range(experts, num_experts, CorruptionError)
    return (experts, num_experts, layer_ids, missing, padding), start
