"""The header of a page in the store: its fingerprint, its digest, its length."""

from __future__ import annotations

import hashlib
import struct

from ....errors import CorruptionError
from ...page import DIGEST_BYTES, PageKey
from ...tier import Found

__all__ = ["HEADER_BYTES", "fingerprint", "pack_header", "unpack_header"]

_MAGIC = b"pbpage\x00\x01"
_HEADER = struct.Struct(f"<8s32s{DIGEST_BYTES}sQ")
HEADER_BYTES = _HEADER.size


def fingerprint(key: PageKey, *, page_bytes: int, attachment_bytes: int) -> bytes:
    """Return 32 bytes that name a page; stores with other sizes have other names for it."""
    sizes = struct.pack("<QQ", page_bytes, attachment_bytes)
    return hashlib.sha256(sizes + key.encode()).digest()


def pack_header(name: bytes, *, digest: bytes, length: int) -> bytes:
    """Pack the header of a value; `length` counts page and attachments."""
    return _HEADER.pack(_MAGIC, name, digest, length)


def unpack_header(data: bytes, name: bytes) -> Found | CorruptionError:
    """Invert `pack_header` if `data` is the header of this page, else return an error."""
    magic, named, digest, length = _HEADER.unpack(data)
    if magic != _MAGIC or named != name:
        return CorruptionError(f"Mooncake holds something else under the name {name.hex()}")
    return Found(length, digest)
