"""Bytes in several pieces of memory, hashed as they are copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from ...errors import CorruptionError

__all__ = ["Reader", "scatter"]

_CHUNK = 256 << 10  # Is still in the cache when it is hashed.


def scatter(parts: Sequence[bytes | memoryview], pieces: list[memoryview], described: bytes) -> int:
    """Copy parts into pieces that are large enough. Local.

    Args:
        described: hashed ahead of them.

    Returns:
        the digest.
    """
    state, memory = xxhash.xxh3_64(described), _Pieces(pieces)
    for part in parts:
        view, position = memoryview(part), 0
        for piece in memory.next(len(view)):
            chunk = view[position : position + len(piece)]
            piece[:] = chunk
            state.update(chunk)
            position += len(piece)
    return _digest(state)


class Reader:
    """Reads what was scattered, in order.

    Args:
        described: as in `scatter`.
        size: bytes of all parts.
        digest: as `scatter` returned it.
        what: they are, for messages.

    Raises:
        CorruptionError: these are other bytes than were written.
    """

    def __init__(
        self, pieces: list[memoryview], described: bytes, *, size: int, digest: int, what: str
    ) -> None:
        state = xxhash.xxh3_64(described)
        if intact := 0 <= size <= sum(map(len, pieces)):
            for chunk in _Pieces(pieces).next(size):
                state.update(chunk)
            intact = _digest(state) == digest
        if not intact:
            raise CorruptionError(
                f"{what} does not match its checksum. It was removed: ask its prompt again."
            )
        self._memory = _Pieces(pieces)

    def read(self, count: int, kind: type[bytes | bytearray]) -> bytes | bytearray:
        """Return the next bytes, so many, as `bytes` or as a `bytearray` of the caller's own."""
        found = [*self._memory.next(count)]
        return kind(found[0]) if len(found) == 1 else kind().join(found)


class _Pieces:
    """Pieces of memory, handed out in order."""

    def __init__(self, pieces: list[memoryview]) -> None:
        self._left = pieces[::-1]

    def next(self, count: int) -> Iterator[memoryview]:
        """Yield the next bytes, so many, in chunks."""
        while count:
            piece = self._left.pop()
            size = min(count, len(piece), _CHUNK)
            if size < len(piece):
                self._left.append(piece[size:])
            count -= size
            yield piece[:size]


def _digest(state: xxhash.xxh3_64) -> int:
    return int.from_bytes(state.digest(), "little", signed=True)
