"""Named bytes that travel with a page, such as the experts its tokens were routed to."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ..errors import ShapeError

__all__ = ["pack_attachments", "unpack_attachments"]

_ITEM = struct.Struct("<HQ")
_COUNT = struct.Struct("<I")


def pack_attachments(attachments: Mapping[str, bytes]) -> bytes:
    """Pack named bytes into one string of bytes; empty for no attachments.

    Raises:
        ShapeError: a name of more than 65535 bytes.
    """
    if not attachments:
        return b""
    parts = [_COUNT.pack(len(attachments))]
    for name, data in attachments.items():
        label, content = name.encode(), bytes(data)
        if len(label) >= 1 << 16:
            raise ShapeError(f"the name of an attachment has {len(label)} bytes; at most 65535 fit")
        parts += [_ITEM.pack(len(label), len(content)), label, content]
    return b"".join(parts)


def unpack_attachments(data: bytes) -> dict[str, bytes]:
    """Invert `pack_attachments`; `data` has passed its checksum."""
    if not data:
        return {}
    (count,) = _COUNT.unpack_from(data)
    attachments, at = {}, _COUNT.size
    for _ in range(count):
        label_bytes, data_bytes = _ITEM.unpack_from(data, at)
        at += _ITEM.size
        label = data[at : at + label_bytes].decode()
        at += label_bytes
        attachments[label] = data[at : at + data_bytes]
        at += data_bytes
    return attachments
