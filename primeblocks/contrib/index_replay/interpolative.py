"""Binary interpolative coding of sets of integers, a whole level at a time.

The middle member of a sorted set is written first, in as few bits as the bounds allow. With `c`
members among the integers `low..high`, the one at `c // 2` has only `high - low + 2 - c` places.
Each half then has tighter bounds. A half that fills its bounds costs nothing, so members that are
close together are cheap.

All sets are at the same depth together, so numpy writes or reads a level of every set in a few
calls. A code of `bits` or `bits + 1` bits is split. The first `bits` of the whole level come first.
They tell a reader which codes have one more bit, and those bits follow.

Source: A. Moffat, L. Stuiver, "Binary interpolative coding for effective index compression" (2000).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import CorruptionError

__all__ = [
    "decode_numbers",
    "decode_sets",
    "encode_numbers",
    "encode_sets",
    "ranges",
    "set_bits",
]

_PIECE = 1 << 14  # members that are coded together: what they take stays in the cache
_FIXED = 64


def encode_sets(members: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> bytes:
    """Encode sets. Local. Makes a few passes over the members for each level.

    Args:
        members: int64, the sets one after the other, each in ascending order.
        counts: int64 `[sets]`.
        sizes: int64 `[sets]`. The members of a set are at least 0 and below its size.
    """
    return b"".join(
        _pack_bits(*_codes(members[first:last], counts[sets], sizes[sets]))
        for sets, first, last in _pieces(counts)
    )


def set_bits(members: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return float64 `[sets]`: the bits that `encode_sets` needs for each set."""
    cost = np.zeros(len(counts))
    for sets, first, last in _pieces(counts):
        levels, found = _levels(counts[sets], sizes[sets]), members[first:last]
        for level in levels:
            turned, bits, short = level.turn(level.read(found))
            widths = bits + (turned >= short)
            cost[sets] += np.bincount(level.owner, widths, minlength=sets.stop - sets.start)
    return cost


def decode_sets(
    data: np.ndarray, counts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the members, and the rest of `data` (uint8) after them.

    Raises:
        CorruptionError: a set cannot have so many members, or the bytes end before the sets do.
    """
    if ((counts < 0) | (counts > sizes)).any():
        raise CorruptionError(
            "the bytes are damaged: a set has more members than integers below its size."
        )
    members = np.zeros(int(counts.sum()), dtype=np.int64)
    for sets, first, last in _pieces(counts):
        reader = _Reader(data)
        found = members[first:last]
        for level in _levels(counts[sets], sizes[sets], found):
            level.write(found, reader)
        data = data[reader.nbytes :]
    return members, data


class _Level:
    """Parts of sets, each with at least one member and more places than members.

    A class instead of arrays, because the halves depend on the middle that was found.
    """

    def __init__(
        self,
        owner: np.ndarray,
        start: np.ndarray,
        count: np.ndarray,
        low: np.ndarray,
        places: np.ndarray,
    ) -> None:
        self.owner, self.start, self.count, self.low, self.places = owner, start, count, low, places
        self.half = count >> 1
        self.choices = places - count + 1  # at least 2
        self.middle: np.ndarray = low

    def read(self, members: np.ndarray) -> np.ndarray:
        """Find the middle in known members. Return its place among the choices."""
        self.middle = members[self.start + self.half]
        return self.middle - self.low - self.half

    def turn(self, choice: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the choices renumbered, so that those in the middle get the short codes."""
        bits, short = self._widths()
        turned = choice - (self.choices - short) // 2
        return turned + self.choices * (turned < 0), bits, short

    def write(self, members: np.ndarray, reader: _Reader) -> None:
        """Read the middle, and put it among the members."""
        bits, short = self._widths()
        turned = reader.read(bits)
        long = np.flatnonzero(turned >= short)
        turned[long] = 2 * turned[long] + reader.read(np.ones_like(long)) - short[long]
        choice = turned + (self.choices - short) // 2
        choice -= self.choices * (choice >= self.choices)
        self.middle = self.low + self.half + choice
        members[self.start + self.half] = self.middle

    def halves(self) -> _Level:
        rest = self.count - 1 - self.half
        above = self.middle + 1
        return _Level(
            np.concatenate([self.owner, self.owner]),
            np.concatenate([self.start, self.start + self.half + 1]),
            np.concatenate([self.half, rest]),
            np.concatenate([self.low, above]),
            np.concatenate([self.middle - self.low, self.low + self.places - above]),
        )

    def keep(self, which: np.ndarray) -> _Level:
        fields = (self.owner, self.start, self.count, self.low, self.places)
        return _Level(*(field[which] for field in fields))

    def _widths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return each code's least number of bits, and how many choices have only these bits."""
        bits = np.frexp(self.choices.astype(np.float64))[1].astype(np.int64) - 1
        return bits, (np.int64(2) << bits) - self.choices


def _levels(
    counts: np.ndarray, sizes: np.ndarray, members: np.ndarray | None = None
) -> Iterator[_Level]:
    """Yield levels one after the other. A part that fills its places goes into `members`."""
    starts = np.cumsum(counts) - counts
    level = _Level(np.arange(len(counts)), starts, counts, np.zeros_like(counts), sizes)
    while len(level.count):
        full = level.count == level.places
        if members is not None and full.any():
            done = level.keep(full)
            members[ranges(done.start, done.count)] = ranges(done.low, done.count)
        level = level.keep((level.count > 0) & ~full)
        if len(level.count):
            yield level
            level = level.halves()


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ranges one after the other, each with `count` integers from its start."""
    total = int(counts.sum())
    return np.arange(total) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def _pieces(counts: np.ndarray) -> Iterator[tuple[slice, int, int]]:
    """Yield sets that are coded together, as slices of the sets with the range of members."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(_PIECE, total, _PIECE), side="left") + 1
    begin = 0
    for end in [*np.unique(cuts).tolist(), len(counts)]:
        if end > begin:
            yield slice(begin, end), int(ends[begin - 1]) if begin else 0, int(ends[end - 1])
        begin = end


def _codes(
    members: np.ndarray, counts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of one piece, and the bits of each."""
    values, widths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for level in _levels(counts, sizes):
        turned, bits, short = level.turn(level.read(members))
        long = turned >= short
        code = turned + short * long
        values += [np.where(long, code >> 1, code), code[long] & 1]
        widths += [bits, np.ones(int(long.sum()), np.int64)]
    return np.concatenate(values), np.concatenate(widths)


def _pack_bits(values: np.ndarray, widths: np.ndarray) -> bytes:
    ends = np.cumsum(widths)
    bits = np.repeat(values, widths)
    bits >>= np.repeat(ends, widths) - 1 - np.arange(len(bits))
    bits &= 1
    return np.packbits(bits.astype(np.uint8)).tobytes()


class _Reader:
    """Reads bits from the beginning of some bytes, many codes at a time."""

    def __init__(self, data: np.ndarray) -> None:
        self._limit = 8 * len(data)
        self._at = 0
        padded = np.zeros(len(data) + 8, dtype=np.uint8)
        padded[: len(data)] = data
        # Eight bytes from each byte on, because a code of up to 57 bits fits in one such word.
        self._words = np.lib.stride_tricks.as_strided(
            padded[:8].view(">u8"), (len(data) + 1,), (1,), writeable=False
        )

    @property
    def nbytes(self) -> int:
        return (self._at + 7) // 8

    def read(self, widths: np.ndarray) -> np.ndarray:
        ends = self._at + np.cumsum(widths)
        if len(ends) and ends[-1] > self._limit:
            raise CorruptionError(f"the bytes are damaged: {self._limit // 8} bytes end too early.")
        starts = ends - widths
        self._at = int(ends[-1]) if len(ends) else self._at
        words = self._words[starts >> 3].astype(np.uint64)
        words <<= (starts & 7).astype(np.uint64)
        # In two steps, because a shift by all 64 bits is undefined.
        return ((words >> np.uint64(1)) >> (63 - widths).astype(np.uint64)).astype(np.int64)


def encode_numbers(numbers: np.ndarray) -> bytes:
    """Encode integers of at least 0, with fewer bits for small integers.

    The code is that of the set of running sums. If one width for all integers takes fewer bits, all
    integers get this width.
    """
    numbers = numbers.astype(np.int64)
    sums = np.cumsum(numbers + 1) - 1
    total = int(sums[-1]) + 1 if len(sums) else 0
    width = int(numbers.max(initial=0)).bit_length()
    count, size = np.array([len(sums)]), np.array([total])
    if set_bits(sums, count, size).sum() < width * len(numbers):
        body, width = encode_sets(sums, count, size), _FIXED
    else:
        body = _pack_bits(numbers, np.full(len(numbers), width))
    return bytes([width]) + total.to_bytes(8, "little") + body


def decode_numbers(data: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` integers, and the rest of `data` after them.

    Raises:
        CorruptionError: the bytes are not encoded numbers.
    """
    if len(data) < 9:
        raise CorruptionError("the bytes are damaged: they end before the first number.")
    width, total = int(data[0]), int.from_bytes(data[1:9].tobytes(), "little")
    if width == _FIXED:
        if total > 1 << 62:
            raise CorruptionError(f"the bytes are damaged: numbers cannot have the sum {total}.")
        sums, rest = decode_sets(data[9:], np.array([count]), np.array([total]))
        return np.diff(sums, prepend=-1) - 1, rest
    if width > 32:
        raise CorruptionError(f"the bytes are damaged: numbers of {width} bits, more than 32.")
    reader = _Reader(data[9:])
    numbers = reader.read(np.full(count, width))
    return numbers, data[9 + reader.nbytes :]
