"""The wire format of routes.

Little-endian, in this order:

    header    magic, version, top_k, experts, layers, tokens (32 bytes)
    layer ids uint32 each
    experts   raw, uint8 or uint16
    missing   one bit a token
    crc32     of everything before it

Raw, because a raw payload unpacks without a copy and expert ids hardly compress (8 bits carry
log2(num_experts)). A crc32 catches every change within 32 adjacent bits with certainty.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from ..errors import CorruptionError, ShapeError, UnsupportedError, UsageError

__all__ = ["check_range", "decode", "encode", "expert_dtype"]

_MAGIC = b"PBRT"
_VERSION = 1
_HEADER = struct.Struct("<4sHHIIQ8x")
_CRC = struct.Struct("<I")


def expert_dtype(num_experts: int) -> np.dtype:
    """uint8 for up to 256 experts, uint16 for up to 65536.

    Raises:
        ShapeError: no such number of experts can be coded.
    """
    if not 1 <= num_experts <= 1 << 16:
        raise ShapeError(f"num_experts must be in 1..65536; got {num_experts}")
    return np.dtype("u1" if num_experts <= 256 else "<u2")


def check_range(experts: np.ndarray, num_experts: int) -> None:
    """Refuse ids outside `0..num_experts - 1`: on a GPU they would end the process.

    Raises:
        UsageError: with the first such id and its place.
    """
    if not experts.size or (experts.max() < num_experts and experts.min() >= 0):
        return
    token, layer, slot = np.argwhere((experts >= num_experts) | (experts < 0))[0]
    raise UsageError(
        f"expert {experts[token, layer, slot]} at token {token}, layer position {layer}, slot"
        f" {slot} is outside 0..{num_experts - 1}. Do the routes belong to this model?"
    )


def encode(
    experts: np.ndarray, missing: np.ndarray, num_experts: int, layer_ids: tuple[int, ...]
) -> bytes:
    """Write one contiguous buffer. Local; copies the experts once."""
    tokens, layers, top_k = experts.shape
    parts = (
        _HEADER.pack(_MAGIC, _VERSION, top_k, num_experts, layers, tokens),
        np.asarray(layer_ids, dtype="<u4").tobytes(),
        np.ascontiguousarray(experts).reshape(-1).view(np.uint8).data,
        np.packbits(missing).data,
    )
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join((*parts, _CRC.pack(crc)))


def decode(
    payload: bytes | bytearray | memoryview,
) -> tuple[np.ndarray, int, tuple[int, ...], np.ndarray]:
    """Experts (a view of `payload`), num_experts, layer ids, missing. Local; reads it twice.

    Raises:
        CorruptionError: a byte was changed, added or lost.
        UnsupportedError: another version of the format.
    """
    buffer = memoryview(payload).cast("B")
    if len(buffer) < _HEADER.size + _CRC.size:
        raise CorruptionError(f"routes are cut off: {len(buffer)} bytes cannot hold a header")
    body = buffer[: -_CRC.size]
    (expected,) = _CRC.unpack(buffer[-_CRC.size :])
    found = zlib.crc32(body)
    if found != expected:
        raise CorruptionError(
            f"routes of {len(buffer)} bytes: crc32 is {found:08x}, was {expected:08x}."
            " Bytes were changed, added or lost. Fetch them again."
        )
    magic, version, top_k, num_experts, layers, tokens = _HEADER.unpack_from(body)
    if magic != _MAGIC:
        raise CorruptionError(f"these bytes are not routes: they begin with {magic!r}")
    if version != _VERSION:
        raise UnsupportedError(
            f"routes of format version {version}; this primeblocks reads version {_VERSION}."
            " Pack and unpack with the same release."
        )
    ids_end = _HEADER.size + 4 * layers
    experts_end = ids_end + tokens * layers * top_k * expert_dtype(num_experts).itemsize
    if len(body) != experts_end + (tokens + 7) // 8:
        raise CorruptionError(f"{len(body)} bytes do not hold {tokens} x {layers} x {top_k} ids")
    layer_ids = np.frombuffer(body[_HEADER.size : ids_end], dtype="<u4")
    experts = np.frombuffer(body[ids_end:experts_end], dtype=expert_dtype(num_experts))
    experts = experts.reshape(tokens, layers, top_k)
    check_range(experts, num_experts)
    bits = np.frombuffer(body[experts_end:], dtype=np.uint8)
    missing = np.unpackbits(bits, count=tokens).view(np.bool_)
    return experts, num_experts, tuple(layer_ids.tolist()), missing
