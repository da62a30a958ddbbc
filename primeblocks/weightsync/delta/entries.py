"""The entries of a delta: how they are found, written and coded.

An entry overwrites the low bits of one element of a tensor. On the host, numpy finds and writes
entries, because its scan is 3 times as fast as torch's `nonzero`. On a device, torch does both, so
that only changed elements cross the bus. A delta is little-endian:

    header    "PBWD", format version (u8), bytes an element (u8), 0 (u16), elements (u64)
    counts    u32 [segments, layers]
    streams   for each segment of 2**24 elements, for each layer: positions, then bits
    digest    xxh3-128 of all bytes before it

The first layer has the changed elements and their low bits. The next layer says which of *those*
elements changed in higher bits, and has the next bits. The last layer has the highest bits.

Positions are Elias-Fano coded: the low bits unchanged, and the high parts as a bit vector in which
each position sets one bit. If more than about a quarter of the possible positions occur, a plain
bitmap is smaller and is used.

Source: Elias 1974, doi:10.1145/321812.321820. Fano 1971, MIT Project MAC Memo 61.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import DTypeLike
from torch import Tensor

from ...errors import CorruptionError, UnsupportedError

__all__ = [
    "ITEMSIZES",
    "Bits",
    "Bytes",
    "Entries",
    "Opened",
    "bits_bytes",
    "flat_bits",
    "open_delta",
    "pack_bits",
    "pack_positions",
    "positions_bytes",
    "read_changes",
    "read_segments",
    "seal_delta",
    "segments",
    "unpack_bits",
    "unpack_positions",
    "write_entries",
]

Bytes = bytes | bytearray | memoryview
Bits = np.ndarray | Tensor
"""The elements of a tensor as integers, flat: numpy on the host, torch on a device."""

_HEADER = struct.Struct("<4sBBHQ")
_KIND, _FORMAT, _DIGEST_BYTES = b"PBWD", 2, 16
_SEGMENT = 1 << 24
# The bit up to which each layer writes. One step in the last place carries out of the low 4 bits in
# one case of 16.
_LAYERS = {1: (4, 8), 2: (4, 8, 16), 4: (4, 8, 16, 32)}

ITEMSIZES = tuple(_LAYERS)
"""The sizes, in bytes, that an element may have."""

_AT_ONCE = 1 << 14  # entries
# If a random tenth of elements changed, this share of groups of 8 has changes. Above it, numpy's
# `nonzero` is fast, because it has no branch.
_MANY = 0.57
_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Entries(NamedTuple):
    """Bits to write: `element = element & ~mask | bits`, at ascending positions.

    Outside `mask`, `bits` are zero or equal to the element's bits.
    """

    positions: np.ndarray
    bits: np.ndarray
    mask: np.ndarray


class Opened(NamedTuple):
    """A delta whose digest and lengths were checked. `counts` is `[segments, layers]`."""

    itemsize: int
    numel: int
    counts: np.ndarray
    streams: memoryview


def flat_bits(tensor: Tensor, width: int) -> Bits:
    """Return a flat view of a contiguous tensor as integers of `width` bytes."""
    # Not view(-1): a single element may have any stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(_TORCH[width])
    if tensor.device.type != "cpu":
        return flat
    # Not .numpy(): after it, the storage cannot be resized, which offloading needs.
    return np.from_dlpack(flat).view(f"u{width}")


def read_changes(pairs: Iterable[tuple[Bits, Bits]], *, update: bool = False) -> Entries:
    """Return the elements that differ between new and old. Their masks are new XOR old.

    Args:
        pairs: consecutive parts of both sides, as (new, old).
        update: whether to write the new elements into the old part.
    """
    start, found = 0, []
    for new, old in pairs:
        scan = _scan_there if isinstance(new, Tensor) else _scan
        at, bits, mask = scan(new, old, update)  # type: ignore[arg-type]
        at += start
        start += len(new)
        found.append((at, bits, mask))
    return Entries(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _scan_there(new: Tensor, old: Tensor, update: bool) -> Entries:
    places = (new != old).nonzero().view(-1)
    after, before = new[places], old[places]
    if update:
        old[places] = after
    bits, was = (side.cpu().numpy().view(f"u{new.itemsize}") for side in (after, before))
    return Entries(places.cpu().numpy(), bits, bits ^ was)


def _scan(new: np.ndarray, old: np.ndarray, update: bool) -> Entries:
    differs = np.zeros(-(-len(new) // 8) * 8, dtype=np.bool_)
    np.not_equal(new, old, out=differs[: len(new)])
    at = _places(differs)
    bits = new.take(at)
    mask = bits ^ old.take(at)
    if update:
        old[at] = bits
    return Entries(at, bits, mask)


def write_entries(target: Bits, entries: Entries) -> None:
    """Write entries in place. Idempotent."""
    positions, bits, mask = entries
    if isinstance(target, np.ndarray):
        for start in range(0, len(positions), _AT_ONCE):  # Reads and writes in the cache.
            here = slice(start, start + _AT_ONCE)
            at = positions[here]
            target[at] = target.take(at) & ~mask[here] | bits[here]
        return
    dtype = str(target.dtype).removeprefix("torch.")
    places, bits_there, keep = (
        torch.from_numpy(array).to(target.device)
        for array in (positions, bits.view(dtype), (~mask).view(dtype))
    )
    target[places] = target[places] & keep | bits_there


def _places(differs: np.ndarray) -> np.ndarray:
    """Return the indices where `differs` is true. Its length must be a multiple of 8."""
    # Eight elements at a time: most groups have no change, and `nonzero` costs 1.2 ns an item.
    groups = differs.view(np.uint64)
    changed = (groups != 0).nonzero()[0]
    if len(changed) > _MANY * len(groups):
        return differs.nonzero()[0]
    inside = groups.take(changed).view(np.bool_).nonzero()[0]
    # Element i of the groups that are left is element i + shift of all.
    shift = changed - np.arange(len(changed))
    shift <<= 3
    inside += shift.take(inside >> 3)
    return inside


def segments(numel: int) -> list[slice]:
    """Return the slices of a tensor that are coded separately."""
    return [slice(at, min(at + _SEGMENT, numel)) for at in range(0, numel, _SEGMENT)]


def seal_delta(itemsize: int, numel: int, parts: Iterable[Entries]) -> bytes | None:
    """Return a delta of the entries of each segment, or None if the tensor itself is not larger."""
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
    """Check a delta as far as possible without decoding it. Reads every byte once.

    Raises:
        CorruptionError: a byte was changed, added or lost, or the bytes are not a delta.
        UnsupportedError: the delta has another format version.
    """
    view = memoryview(delta).cast("B")
    body, digest = view[:-_DIGEST_BYTES], view[-_DIGEST_BYTES:]
    if len(body) < _HEADER.size or xxhash.xxh3_128_digest(body) != digest:
        raise CorruptionError(
            f"the digest of a delta of {len(view)} bytes does not match: bytes were changed, added"
            " or lost. Fetch the delta again, or the tensor in full."
        )
    kind, found, itemsize, _, numel = _HEADER.unpack_from(body)
    if kind != _KIND:
        raise CorruptionError(f"these bytes are {kind!r}. Pass a result of encode_delta().")
    if found != _FORMAT:
        raise UnsupportedError(
            f"the delta has format version {found}, but this primeblocks reads version {_FORMAT}. "
            "Encode and apply with the same release."
        )
    layers = _LAYERS.get(itemsize, ())
    start = _HEADER.size + -(-numel // _SEGMENT) * len(layers) * 4
    if not layers or start > len(body):
        raise CorruptionError(
            f"{len(view)} bytes are not a delta of {numel} elements of {itemsize} bytes. Publish "
            "again."
        )
    counts = np.frombuffer(body[_HEADER.size : start], dtype="<u4").reshape(-1, len(layers))
    opened = Opened(itemsize, numel, counts, body[start:])
    expected = sum(sum(lengths) for _, lengths in _lengths(opened))
    if expected != len(opened.streams):
        raise CorruptionError(
            f"the delta has {len(opened.streams)} bytes of streams; expected {expected}. Publish "
            "again."
        )
    return opened


def read_segments(opened: Opened) -> Iterator[Entries]:
    """Yield the entries of each segment.

    Raises:
        CorruptionError: positions are missing, surplus or outside the segment. An accident cannot
            cause this, because the digest was right.
    """
    at = 0
    for (universe, lengths), counts in zip(_lengths(opened), opened.counts.tolist(), strict=True):
        streams = []
        for length in lengths:
            streams.append(opened.streams[at : at + length])
            at += length
        yield _decode(streams, counts, universe, opened.itemsize)


def _lengths(opened: Opened) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of elements of each segment, and the bytes of each of its streams."""
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
        # The next layer's positions count the entries of this layer.
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


def bits_bytes(count: int, width: int) -> int:
    """Return the bytes that `pack_bits` needs for `count` numbers below 2**width."""
    whole, rest = divmod(width, 8)
    return count * whole + -(-count // 8) * rest


def pack_bits(values: np.ndarray, width: int) -> bytes:
    """Pack the low `width` bits of each number.

    Whole bytes come first, one plane per byte of the number. Then come the r < 8 bits left over.
    The leftover bits of eight numbers fill r bytes.
    """
    whole, rest = divmod(width, 8)
    planes = [(values >> 8 * plane).astype(np.uint8).tobytes() for plane in range(whole)]
    if rest:
        digits: np.ndarray = np.zeros(-(-len(values) // 8) * 8, dtype=np.uint8)
        digits[: len(values)] = (values >> 8 * whole).astype(np.uint8) & ((1 << rest) - 1)
        # Two neighbours become adjacent in one word: first of 8 bits each, then of 16, then of 32.
        for half in (8, 16, 32):
            word = digits.view(f"u{half // 4}")
            digits = word & ((1 << half) - 1) | word >> half << rest * half // 8
        # Copied first: tobytes() of a view with gaps goes byte by byte.
        planes.append(digits.view(np.uint8).reshape(-1, 8)[:, :rest].copy().tobytes())
    return b"".join(planes)


def unpack_bits(buffer: memoryview, count: int, width: int, dtype: DTypeLike) -> np.ndarray:
    """Return the numbers that `pack_bits` wrote. `buffer` must have exactly their bytes."""
    whole, rest = divmod(width, 8)
    data = np.frombuffer(buffer, dtype=np.uint8)
    values = np.zeros(count, dtype=dtype)
    if rest:
        groups = -(-count // 8)
        digits: np.ndarray = np.zeros(8 * groups, dtype=np.uint8)
        digits.reshape(groups, 8)[:, :rest] = data[count * whole :].reshape(groups, rest)
        for half in (32, 16, 8):
            word, short = digits.view(f"u{half // 4}"), rest * half // 8
            digits = word & ((1 << short) - 1) | word >> short << half
        values |= digits.view(np.uint8)[:count]
        values <<= 8 * whole
    for plane in range(whole):
        values |= data[plane * count : (plane + 1) * count].astype(dtype) << 8 * plane
    return values


def positions_bytes(count: int, universe: int) -> int:
    """Return the bytes that `pack_positions` needs for `count` positions below `universe`."""
    if not count:
        return 0
    low = _low_bits(count, universe)
    return -(-_high_length(count, universe, low) // 8) + bits_bytes(count, low)


def pack_positions(positions: np.ndarray, universe: int) -> bytes:
    """Pack ascending distinct positions (int64) below `universe`."""
    count = len(positions)
    if not count:
        return b""
    low = _low_bits(count, universe)
    bits = np.zeros(_high_length(count, universe, low), dtype=np.bool_)
    bits[(positions >> low) + np.arange(count) if low else positions] = True
    return np.packbits(bits, bitorder="little").tobytes() + pack_bits(positions, low)


def unpack_positions(buffer: memoryview, count: int, universe: int) -> np.ndarray:
    """Return the positions that `pack_positions` wrote, as int64, from exactly their bytes.

    Raises:
        CorruptionError: the bytes are not `count` ascending positions below `universe`.
    """
    if not count:
        return np.zeros(0, dtype=np.int64)
    low = _low_bits(count, universe)
    length = _high_length(count, universe, low)
    head = -(-length // 8)
    bits = np.unpackbits(
        np.frombuffer(buffer[:head], dtype=np.uint8), count=length, bitorder="little"
    )
    positions = bits.view(np.bool_).nonzero()[0]
    if len(positions) != count:
        raise CorruptionError(f"got {len(positions)} positions, not {count}. Publish again.")
    if low:
        positions -= np.arange(count)
        positions <<= low
        positions |= unpack_bits(buffer[head:], count, low, np.int64)
        # The high parts ascend by construction. Low bits of one high part may not.
        if (positions[1:] <= positions[:-1]).any():
            raise CorruptionError(f"{count} positions do not ascend. Publish again.")
    if positions[-1] >= universe:
        raise CorruptionError(
            f"position {positions[-1]} is beyond the end, {universe}. Publish again."
        )
    return positions


def _low_bits(count: int, universe: int) -> int:
    """Return how many low bits are stored unchanged. 0 means a bitmap."""
    low = (universe // count).bit_length() - 1
    return low if low > 1 else 0


def _high_length(count: int, universe: int, low: int) -> int:
    return universe if low == 0 else count + ((universe - 1) >> low) + 1
