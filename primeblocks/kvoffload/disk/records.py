"""Records of the journal, and the recovery of a journal that may be torn or damaged."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from ...errors import CorruptionError
from ..page import PageKey

__all__ = ["DROP", "MARK", "PUT", "Entry", "Place", "Replay", "encode", "replay"]

PUT, DROP, MARK = 1, 2, 3

_MAGIC = b"\xf5kvR"
_HEAD = struct.Struct("<4sII")  # magic, bytes of the record, checksum of these bytes
_BODY = struct.Struct("<QBQQ16s")  # sequence, kind, frame, length, digest; then the key
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Place:
    """A page's place in the data file, its length and its digest."""

    frame: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: a put, a drop, or a mark that all before is known to be on the disk."""

    kind: int
    key: PageKey | None = None
    place: Place | None = None


def encode(entry: Entry, *, sequence: int, generation: int) -> bytes:
    """Encode a record. `generation` tells this journal from those in its place before."""
    name = b"" if entry.key is None else entry.key.encode()
    place = entry.place or Place(0, 0, bytes(16))
    size = _HEAD.size + _BODY.size + len(name) + _SUM.size
    data = b"".join(
        (
            _HEAD.pack(_MAGIC, size, _head_sum(size, generation)),
            _BODY.pack(sequence, entry.kind, place.frame, place.length, place.digest),
            name,
        )
    )
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data, seed=generation))


_NOTHING = (Entry(MARK), 0)


@dataclass
class Replay:
    """The content of a journal.

    Args:
        places: the place of every page, oldest first.
        sequence: number of the last record.
        end: offset behind the last record that was believed.
        damaged: something before the end of the file was not a record.
        flushed: number of the last mark; 0 for none.
    """

    places: dict[PageKey, Place] = field(default_factory=dict)
    sequence: int = 0
    end: int = 0
    damaged: bool = False
    flushed: int = 0
    _since: dict[PageKey, int] = field(default_factory=dict)
    _owners: dict[int, PageKey] = field(default_factory=dict)
    _gap: int = 0

    def apply(self, entry: Entry, sequence: int) -> None:
        self.sequence = sequence
        if entry.kind == MARK:
            if self._gap:  # the missing records were on the disk, drops of older pages included
                self._forget(lambda since: since <= self._gap)
            self.flushed = sequence
            return
        assert entry.key is not None
        self._remove(entry.key)
        if entry.place is not None:
            # A frame has one page: where a drop is missing, the page that came later counts.
            self._remove(self._owners.get(entry.place.frame))
            self.places[entry.key] = entry.place
            self._since[entry.key] = sequence
            self._owners[entry.place.frame] = entry.key

    def gap(self) -> None:
        """Note that records are missing here: they may have dropped any page put before."""
        self.damaged = True
        self._gap = self.sequence
        self._forget(lambda since: since > self.flushed)

    def _forget(self, old: Callable[[int], bool]) -> None:
        for key in [key for key, since in self._since.items() if old(since)]:
            self._remove(key)

    def _remove(self, key: PageKey | None) -> None:
        if key is not None and key in self.places:
            del self._owners[self.places.pop(key).frame]
            del self._since[key]


def replay(data: bytes, *, start: int, generation: int) -> Replay:
    """Read a journal from `start`; local, one pass.

    A record that the end of the file cuts off was being written when the process died, so it was
    not answered, and all before it counts. Anything else that is no record is damage. Pages from
    before it are not believed, as their drops may be what was lost. A page of a flush before the
    damage, with no later flush behind it, is kept: the missing records were never known to be on
    the disk, and a power cut may undo drops since the last flush.
    """
    said = Replay(end=start)
    at, missing = start, False
    while len(data) - at >= _HEAD.size:
        magic, size, head_sum = _HEAD.unpack_from(data, at)
        intact = magic == _MAGIC and head_sum == _head_sum(size, generation)
        if intact and at + size > len(data):
            break
        entry, sequence = _decode(data[at : at + size], generation) if intact else _NOTHING
        if sequence > said.sequence:
            if said.sequence and sequence != said.sequence + 1 and not missing:
                said.gap()
            said.apply(entry, sequence)
            missing = False
            said.end = at = at + size
            continue
        if not missing:
            said.gap()
            missing = True
        following = data.find(_MAGIC, at + 1)
        at = following if following >= 0 else len(data)
    return said


def _decode(data: bytes, generation: int) -> tuple[Entry, int]:
    """Decode a record and its number; the number is 0 where the bytes are no record."""
    if len(data) < _HEAD.size + _BODY.size + _SUM.size:
        return _NOTHING
    content = data[: -_SUM.size]
    (expected,) = _SUM.unpack(data[-_SUM.size :])
    if xxhash.xxh3_64_intdigest(content, seed=generation) != expected:
        return _NOTHING
    sequence, kind, frame, length, digest = _BODY.unpack_from(content, _HEAD.size)
    if kind == MARK:
        return Entry(MARK), sequence
    try:
        key = PageKey.decode(content[_HEAD.size + _BODY.size :])
    except CorruptionError:
        return _NOTHING
    return Entry(kind, key, Place(frame, length, digest) if kind == PUT else None), sequence


def _head_sum(size: int, generation: int) -> int:
    return xxhash.xxh32_intdigest(_MAGIC + size.to_bytes(4, "little"), seed=generation & 0xFFFFFFFF)
