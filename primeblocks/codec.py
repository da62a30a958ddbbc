"""Conversion of values to bytes with a checksum. Reading does not run code, unlike with pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from .attachments import Aligned
from .errors import CorruptionError, UnsupportedError

__all__ = [
    "lower",
    "pack",
    "unpack",
]

# Payload: xxh3-64 of the name and the rest, the length of the header, the header as JSON, then
# arrays and bytes.
_DIGEST_BYTES = 8
_LENGTH_BYTES = 8
_SCALARS = frozenset({type(None), bool, int, float, str})
_NUMBERS = frozenset("biufc")  # dtype.kind: bool, integers, floating, complex
_SEQUENCES = {"list": list, "tuple": tuple}


def _digest(name: str, *parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_64(name.encode())
    for part in parts:
        state.update(part)
    return state.digest()


def pack(value: Any, *, name: str) -> bytes:
    """Return a value as bytes with a checksum.

    Supported types are bool, int, float, str, bytes, None, and numpy numbers and arrays. A list, a
    tuple, a dict with str keys or an `Aligned` may contain values of supported types. `pack` also
    accepts a bytearray or a memoryview, which `unpack` returns as bytes.

    Args:
        name: name of the value, for error messages. Pass the same name to `unpack`.

    Raises:
        UnsupportedError: the value contains an unsupported type, is nested too deeply, or contains
            itself.
    """
    header, buffers = lower(value, name=name)
    parts = [len(header).to_bytes(_LENGTH_BYTES, "little"), header, *buffers]
    return b"".join([_digest(name, *parts), *parts])


def unpack(payload: bytes, *, name: str) -> Any:
    """Return the value that `pack` converted to bytes.

    Raises:
        CorruptionError: a byte of `payload` changed, or `pack` was called with another name.
    """
    view = memoryview(payload)
    body = view[_DIGEST_BYTES:]
    if len(body) < _LENGTH_BYTES or _digest(name, body) != view[:_DIGEST_BYTES]:
        raise CorruptionError(f"{name}: {len(view)} bytes do not match their checksum")
    start = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    left = body[start:]

    def read(count: int) -> memoryview:
        nonlocal left
        taken, left = left[:count], left[count:]
        return taken

    header = bytes(body[_LENGTH_BYTES:start]).decode("utf-8", "surrogatepass")
    return _lift(json.loads(header), read)


def lower(value: Any, *, name: str) -> tuple[bytes, list[bytes | memoryview]]:
    """Split a value into a header, and buffers with the arrays and bytes that the value contains.

    Arrays are copied only if they are not contiguous or not little-endian.

    Raises:
        UnsupportedError: as for `pack`.
    """
    buffers: list[bytes | memoryview] = []
    try:
        text = json.dumps(_lower(value, buffers, name), ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise UnsupportedError(f"{name} is nested too deeply, or contains itself") from error
    except UnsupportedError:  # Also a ValueError, with its own message.
        raise
    except ValueError as error:  # An integer of thousands of digits.
        raise UnsupportedError(f"{name} cannot be written as JSON: {error}") from error
    return text.encode("utf-8", "surrogatepass"), buffers


def _lower(value: Any, buffers: list[bytes | memoryview], name: str) -> Any:
    """Return a value as JSON, in which the key of a dict of one key names a type."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in {bytes, bytearray, memoryview}:
        buffers.append(bytes(value))  # bytes are not copied.
        return {"bytes": len(buffers[-1])}
    if kind in {list, tuple}:
        if not {*map(type, value)} <= _SCALARS:
            value = [_lower(x, buffers, f"{name}[{i}]") for i, x in enumerate(value)]
        return {kind.__name__: value}
    if kind in {dict, MappingProxyType}:
        for key in value:
            if type(key) is not str:
                raise UnsupportedError(f"{name} has the key {key!r}; keys must be str")
        return {"dict": {k: _lower(x, buffers, f"{name}[{k!r}]") for k, x in value.items()}}
    if kind is Aligned:
        held = _lower(value.value, buffers, name)
        return {"aligned": [held, value.start, value.stop, value.by_token]}
    return _lower_numbers(value, buffers, name)


def _lower_numbers(value: Any, buffers: list[bytes | memoryview], name: str) -> dict[str, Any]:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _NUMBERS:
        of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        raise UnsupportedError(
            f"{name} is a {type(value).__name__}{of}, which cannot be packed. Convert it to bytes "
            "(routes.pack()), to an array of numbers (tensor.numpy(force=True)), or to a list or "
            "dict of these."
        )
    little = np.asarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
    # A view if possible, because attachments may be large.
    flat = np.ascontiguousarray(little).reshape(-1)
    buffers.append(flat.view(np.uint8).data if flat.size else b"")
    if isinstance(value, np.generic):
        return {"number": little.dtype.str}
    kind = "array" if value.flags.writeable else "constant"
    return {kind: [little.dtype.str, list(little.shape)]}


def _lift(value: Any, read: Callable[[int], memoryview]) -> Any:
    """Undo `_lower`, reading buffers in the order in which they were added. Copies each buffer.

    A read-only array stays read-only.
    """
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "bytes":
        return bytes(read(held))
    if kind == "number":
        dtype = np.dtype(held)
        return np.frombuffer(bytes(read(dtype.itemsize)), dtype)[0]
    if kind in {"array", "constant"}:
        dtype = np.dtype(held[0])
        own = bytearray if kind == "array" else bytes
        raw = own(read(dtype.itemsize * prod(held[1])))
        return np.frombuffer(raw, dtype).reshape(held[1])
    if kind == "dict":
        return {key: _lift(each, read) for key, each in held.items()}
    values = [_lift(each, read) for each in held]
    return Aligned(*values) if kind == "aligned" else _SEQUENCES[kind](values)
