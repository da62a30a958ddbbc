"""Bytes in several pieces of memory, hashed as they are copied."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from ...errors import CorruptionError

__all__ = ["Reader", "scatter"]

_CHUNK = 256 << 10  # Is still in the cache when it is hashed.


def scatter(
    parts: Sequence[bytes | memoryview], pieces: list[memoryview], described: bytes
) -> tuple[int, int]:
    """Copy parts, the first of which is a header, into pieces that are large enough. Local.

    Args:
        described: hashed ahead of them.

    Returns:
        the digests after the header, and at the end.
    """
    state, memory = xxhash.xxh3_64(described), _Pieces(pieces)
    after_header = 0
    for number, part in enumerate(parts):
        view, position = memoryview(part), 0
        for piece in memory.next(len(view)):
            chunk = view[position : position + len(piece)]
            piece[:] = chunk
            state.update(chunk)
            position += len(piece)
        if number == 0:
            after_header = _digest(state)
    return after_header, _digest(state)


class Reader:
    """Reads what was scattered, in order, and checks it.

    Args:
        described: as in `scatter`.
        sizes: bytes of the header, and of all parts.
        digests: as `scatter` returned them.
        what: they are, for messages.

    Raises:
        CorruptionError: the pieces are too small, here; later: other bytes than were written.
    """

    def __init__(
        self,
        pieces: list[memoryview],
        described: bytes,
        *,
        sizes: tuple[int, int],
        digests: tuple[int, int],
        what: str,
    ) -> None:
        self._memory, self._state = _Pieces(pieces), xxhash.xxh3_64(described)
        self._header, self._left = sizes
        self._digests, self._what = digests, what
        if self._left > sum(map(len, pieces)):
            raise self._damaged()

    def header(self) -> bytes:
        """Return the header, which comes first."""
        header = bytes(self.read(self._header, bytes))
        if _digest(self._state) != self._digests[0]:
            raise self._damaged()
        return header

    def read(self, count: int, kind: type[bytes | bytearray]) -> bytes | bytearray:
        """Return the next bytes, so many, as `bytes` or as a `bytearray` of the caller's own."""
        if not 0 <= count <= self._left:
            raise self._damaged()
        self._left -= count
        found = self._memory.next(count)
        made = kind(found[0]) if len(found) == 1 else kind().join(found)
        self._state.update(made)
        return made

    def check(self) -> None:
        """Raise CorruptionError if that was not all, or not what was written."""
        if self._left or _digest(self._state) != self._digests[1]:
            raise self._damaged()

    def _damaged(self) -> CorruptionError:
        return CorruptionError(
            f"{self._what} does not match its checksum. It was removed: ask its prompt again."
        )


class _Pieces:
    """Pieces of memory, handed out in order."""

    def __init__(self, pieces: list[memoryview]) -> None:
        self._left = pieces[::-1]

    def next(self, count: int) -> list[memoryview]:
        """Return the next bytes, so many, in chunks."""
        found = []
        while count:
            piece = self._left.pop()
            size = min(count, len(piece), _CHUNK)
            if size < len(piece):
                self._left.append(piece[size:])
            count -= size
            found.append(piece[:size])
        return found


def _digest(state: xxhash.xxh3_64) -> int:
    return int.from_bytes(state.digest(), "little", signed=True)
