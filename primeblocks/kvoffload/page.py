"""A page of keys and values: its key, its checksum, and named bytes that travel with it."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import xxhash

from ..errors import CorruptionError, PlanError, ShapeError, UsageError, check_counts, shown

__all__ = [
    "ALIGNMENT",
    "DIGEST_BYTES",
    "PageKey",
    "checksum",
    "frames_of",
    "pack_attachments",
    "page_hashes",
    "unpack_attachments",
]

ALIGNMENT = 4096  # what direct I/O asks of addresses and lengths
DIGEST_BYTES = 16

# A key is its head, the salt, the hash, the recipe, and its tail.
_HEAD = struct.Struct("<BIII")  # whether the salt is text, and the three lengths
_TAIL = struct.Struct("<I?q")  # the group, whether there is a version, and the version
_ITEM = struct.Struct("<HQ")  # of an attachment
_COUNT = struct.Struct("<I")


class PageKey(bytes):
    """The name of one page, as bytes that encode all its fields.

    Keys are equal only if all their fields are equal.

    Args:
        salt: the namespace of one policy version of one training run, such as "run-1/7", because
            pages on a disk survive the run. Pass `b""` if `hash` already includes the namespace.
        hash: a hash of all tokens up to the end of the page.
        group: the group of layers that the page belongs to.
        version: the policy version that wrote the page. With None, the page never becomes stale.
        recipe: a fingerprint of how the bytes are made: dtype, scales, layout and model.

    Raises:
        PlanError: a field has a wrong type, or a text is not Unicode. Also raised if `group`
            does not fit in 32 bits, or if `version` does not fit in 64 bits.
    """

    # While a page moves to a disk, its key is looked up about 30 times and written 5 times. Hashing
    # and encoding the key in Python each time took a tenth of the total time.

    def __new__(
        cls,
        salt: str | bytes,
        hash: bytes,
        group: int = 0,
        version: int | None = None,
        recipe: str = "",
    ) -> Self:
        if not isinstance(salt, str | bytes):
            raise _misfit("salt", salt, "text or bytes")
        if not isinstance(hash, bytes):
            raise _misfit("hash", hash, "bytes")
        if not isinstance(recipe, str):
            raise _misfit("recipe", recipe, "text")
        group = _whole("group", group, 0, 1 << 32)
        number = 0 if version is None else _whole("version", version, -(1 << 63), 1 << 63)
        try:
            salt_bytes = salt.encode() if isinstance(salt, str) else salt
            recipe_bytes = recipe.encode()
            text, sizes = isinstance(salt, str), (len(salt_bytes), len(hash), len(recipe_bytes))
            head = _HEAD.pack(text, *sizes)
            tail = _TAIL.pack(group, version is not None, number)
            return super().__new__(cls, head + salt_bytes + hash + recipe_bytes + tail)
        except (UnicodeEncodeError, struct.error) as error:
            names = salt, hash, group, version, recipe
            raise PlanError(
                f"PageKey{names} cannot be written as bytes: {error}. Pass Unicode text, and at "
                "most 4 GiB per field."
            ) from error

    @property
    def salt(self) -> str | bytes:
        return self._fields()[0]

    @property
    def hash(self) -> bytes:
        return self._fields()[1]

    @property
    def group(self) -> int:
        return self._fields()[2]

    @property
    def version(self) -> int | None:
        _, versioned, version = _TAIL.unpack_from(self, len(self) - _TAIL.size)
        return version if versioned else None

    @property
    def recipe(self) -> str:
        return self._fields()[4]

    def encode(self) -> bytes:
        """Return the key as plain bytes. Different keys give different bytes. Local."""
        return bytes(self)

    @classmethod
    def decode(cls, data: bytes) -> PageKey:  # type: ignore[override]
        """Return the key that `encode` turned into `data`. Local.

        Raises:
            CorruptionError: `data` is not an encoded key.
        """
        try:
            key = cls(*cls._fields(data))
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptionError(
                f"PageKey.decode() got {len(data)} bytes that are not a page key: {error}. Pass "
                "what encode() returned."
            ) from error
        if key != data:
            raise CorruptionError(
                f"PageKey.decode() got {len(data)} bytes that are not a page key: they do not "
                "round-trip. Pass what encode() returned."
            )
        return key

    def _fields(self: bytes) -> tuple[Any, ...]:
        text, salt_bytes, hash_bytes, _ = _HEAD.unpack_from(self)
        start = _HEAD.size + salt_bytes
        salt, hash = self[_HEAD.size : start], self[start : start + hash_bytes]
        recipe = self[start + hash_bytes : -_TAIL.size].decode()
        group, versioned, version = _TAIL.unpack(self[-_TAIL.size :])
        return salt.decode() if text else salt, hash, group, version if versioned else None, recipe

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self._fields()

    def __repr__(self) -> str:
        return "PageKey(salt={!r}, hash={!r}, group={}, version={}, recipe={!r})".format(
            *self._fields()
        )

    __str__ = __repr__


def _whole(name: str, value: Any, start: int, end: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not start <= number < end:
        raise _misfit(name, value, f"whole numbers from {start} to {end - 1}")
    return number


def _misfit(name: str, value: Any, wanted: str) -> PlanError:
    return PlanError(f"PageKey({name}=) takes {wanted}; got {shown(value)}.")


def page_hashes(tokens: Any, *, page_tokens: int) -> list[bytes]:
    """Return a hash for each whole page of a prompt, over all tokens up to the page's end. Pure.

    Each hash is the SHA-256 of the previous hash and the page's tokens, as 64-bit integers with the
    lowest byte first.

    Args:
        tokens: the token ids, as a list, an array, or a tensor in host memory.
        page_tokens: the number of tokens per page. Tokens after the last whole page do not get a
            hash.

    Raises:
        PlanError: `page_tokens` is below 1, or `tokens` is not one dim of integers below 2**63 in
            host memory.
    """
    check_counts(page_tokens=page_tokens)
    try:
        ids = np.asarray(tokens)
    except (RuntimeError, TypeError, ValueError) as error:  # Of torch for one, of numpy for two.
        raise PlanError(
            f"a prompt must be one-dimensional integers in host memory: {error}. Pass tokens.cpu()."
        ) from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise PlanError(
            f"a prompt must be one-dimensional integers; got {ids.dtype} of shape {ids.shape}"
        )
    if ids.size and ids.max() >= 1 << 63:  # It would be taken for a negative one.
        raise PlanError(f"token ids must be below 2**63; got {ids.max()}")
    hashes, last = [], b""
    for end in range(page_tokens, ids.size + 1, page_tokens):
        page = ids[end - page_tokens : end].astype("<i8")
        last = hashlib.sha256(last + page.tobytes()).digest()
        hashes.append(last)
    return hashes


def checksum(key: PageKey, content: np.ndarray) -> bytes:
    """Return a digest of a key and its content (XXH3, 128 bits). Local, above 10 GB/s per core.

    The digest covers the key, so intact bytes of another page fail the check. It detects accidents,
    and does not defend against forgery.
    """
    digest = xxhash.xxh3_128(key)
    digest.update(content.data)
    return digest.digest()


def frames_of(
    tier: str, *, capacity_bytes: int, page_bytes: int, attachment_bytes: int
) -> tuple[int, int]:
    """Return the bytes of a frame, rounded up to 4096, and how many frames fit.

    Raises:
        PlanError: a size is not positive, or not even one page fits.
    """
    if page_bytes <= 0 or attachment_bytes < 0:
        raise PlanError(
            "page_bytes must be positive and attachment_bytes not negative; "
            f"got {page_bytes} and {attachment_bytes}"
        )
    frame_bytes = -(-(page_bytes + attachment_bytes) // ALIGNMENT) * ALIGNMENT
    if capacity_bytes < frame_bytes:
        raise PlanError(
            f"a {tier} tier of {capacity_bytes} bytes does not hold one frame of {frame_bytes} "
            f"bytes. A frame is a page of {page_bytes} bytes and {attachment_bytes} bytes of "
            f"attachments, rounded up to {ALIGNMENT}. Raise capacity_bytes."
        )
    return frame_bytes, capacity_bytes // frame_bytes


def pack_attachments(attachments: Mapping[str, bytes]) -> bytes:
    """Pack named bytes into one bytes object, which is empty without attachments.

    Raises:
        ShapeError: a name has more than 65535 bytes.
        UsageError: a name is not text, or its data are not bytes.
    """
    if not attachments:
        return b""
    parts = [_COUNT.pack(len(attachments))]
    for name, data in attachments.items():
        try:
            # Not bytes(data), which makes zeros of a number.
            label, content = name.encode(), memoryview(data).tobytes()
        except (AttributeError, TypeError, UnicodeEncodeError) as error:
            raise UsageError(
                f"attachments must be a dict from names to bytes; got {shown(data)} under the "
                f"name {shown(name)}. Encode them as bytes."
            ) from error
        if len(label) >= 1 << 16:
            raise ShapeError(
                f"the name of an attachment has {len(label)} bytes; at most 65535 fit. Use a "
                "shorter name."
            )
        parts += [_ITEM.pack(len(label), len(content)), label, content]
    return b"".join(parts)


def unpack_attachments(data: bytes) -> dict[str, bytes]:
    """Return the attachments that `pack_attachments` packed. `data` must have been checked."""
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
