"""A page of keys and values: its key, its bytes, its checksum."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import CorruptionError, PlanError, ShapeError, UnsupportedError

__all__ = [
    "DIGEST_BYTES",
    "PageKey",
    "checksum",
    "pack_attachments",
    "page_view",
    "unpack_attachments",
]

DIGEST_BYTES = 16

_SIZES = struct.Struct("<BII")
_TAIL = struct.Struct("<I?q")
_ITEM = struct.Struct("<HQ")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PageKey:
    """The name of one page.

    Two keys are equal where all four fields are equal, so a page saved under one salt or one
    version is never found under another.

    Args:
        salt: namespace of one policy; `b""` where `hash` already contains it.
        hash: hash of every token up to the end of the page.
        group: group of layers that the page belongs to.
        version: policy version that wrote the page; None never goes stale.

    Raises:
        PlanError: a group outside 32 bits or a version outside 64.
    """

    salt: str | bytes
    hash: bytes
    group: int = 0
    version: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.group < 1 << 32:
            raise PlanError(f"a group of layers is a number from 0 to 2**32 - 1; got {self.group}")
        if self.version is not None and not -(1 << 63) <= self.version < 1 << 63:
            raise PlanError(f"a version fits in 64 bits; got {self.version}")

    def encode(self) -> bytes:
        """The key as bytes; different keys give different bytes. Local."""
        text = isinstance(self.salt, str)
        salt = self.salt.encode() if isinstance(self.salt, str) else self.salt
        version = self.version if self.version is not None else 0
        head = _SIZES.pack(text, len(salt), len(self.hash))
        return head + salt + self.hash + _TAIL.pack(self.group, self.version is not None, version)

    @classmethod
    def decode(cls, data: bytes) -> PageKey:
        """The inverse of `encode`.

        Raises:
            CorruptionError: these bytes are not an encoded key.
        """
        try:
            text, salt_bytes, hash_bytes = _SIZES.unpack_from(data)
            split = _SIZES.size + salt_bytes
            salt, digest = data[_SIZES.size : split], data[split : split + hash_bytes]
            group, versioned, version = _TAIL.unpack(data[split + hash_bytes :])
            key = cls(
                salt.decode() if text else salt, digest, group, version if versioned else None
            )
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptionError(f"{len(data)} bytes are no page key: {error}") from error
        if key.encode() != data:
            raise CorruptionError(f"{len(data)} bytes are no page key: they do not round-trip")
        return key


def checksum(key: PageKey, content: np.ndarray) -> bytes:
    """A digest of a key and its content; local, about 1 GB/s.

    The key takes part, so that intact bytes under another page's name do not pass.
    SHA-256, shortened: as fast as CRC-32 where the CPU has SHA instructions, and free of
    collisions, which a 32-bit sum over many millions of pages is not.
    """
    digest = hashlib.sha256(key.encode())
    digest.update(content.data)
    return digest.digest()[:DIGEST_BYTES]


def page_view(page: Any, *, page_bytes: int, writable: bool) -> np.ndarray:
    """The bytes of a page, without a copy.

    Args:
        page: a contiguous CPU tensor, a contiguous array or a buffer of `page_bytes` bytes.
        writable: whether the view is to be written to.

    Raises:
        ShapeError: wrong number of bytes, not contiguous, or read-only where written.
        UnsupportedError: the tensor is not in host memory.
    """
    if isinstance(page, torch.Tensor):
        if page.device.type != "cpu":
            raise UnsupportedError(
                f"pages are saved from host memory; got a tensor on {page.device}. Copy it with "
                ".cpu(), or let the engine's own worker copy between device and host."
            )
        if not page.is_contiguous():
            raise ShapeError(f"a page must be contiguous; got strides {page.stride()}")
        view = page.detach().reshape(-1).view(torch.uint8).numpy()
    else:
        raw = memoryview(page)
        if not raw.c_contiguous:
            raise ShapeError(f"a page must be contiguous; got strides {raw.strides}")
        if writable and raw.readonly:
            raise ShapeError("a page is loaded into a writable buffer; got a read-only one")
        view = np.frombuffer(raw, dtype=np.uint8)
    if view.nbytes != page_bytes:
        raise ShapeError(f"a page of this store has {page_bytes} bytes; got {view.nbytes}")
    return view


def pack_attachments(attachments: Mapping[str, bytes]) -> bytes:
    """Named bytes as one string of bytes; empty for no attachments."""
    if not attachments:
        return b""
    parts = [_COUNT.pack(len(attachments))]
    for name, data in attachments.items():
        label = name.encode()
        parts += [_ITEM.pack(len(label), len(data)), label, bytes(data)]
    return b"".join(parts)


def unpack_attachments(data: bytes) -> dict[str, bytes]:
    """The inverse of `pack_attachments`; `data` has passed its checksum."""
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
