"""Sets of experts as numbers: the densest fixed-size code, and duplicates found fast.

`top_k` of `num_experts` ids in any order are one of `C(num_experts, top_k)` sets, so 8 of 256 need
49 bits instead of 64. The number of a set of ids c1 < c2 < ... is `C(c1, 1) + C(c2, 2) + ...`
(the combinatorial number system), and the largest id comes back first: it is the last c whose
`C(c, k)` is not above the number. Rows whose number would not fit a float64 exactly, or whose ids
would not fit a word, are cut into groups after sorting. An id takes at least one bit, so that no
code, whoever made it, expands to more than eight times its size.

Numpy on pieces that stay in the cache: sorting is a network of minima and maxima over columns, and
undoing a number takes three table lookups an id. Derivation: docs/replay.md, "Dense coding".
Source: D. E. Knuth, TAOCP 7.2.1.3; K. E. Batcher, "Sorting networks and their applications" (1968).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from ..errors import CorruptionError, UnsupportedError, UsageError

__all__ = ["SetCode", "far_apart", "refuse_duplicates", "rows_with_duplicates", "same_sets"]

_PIECE = 1 << 15  # rows; a multiple of 8, so that bit planes of pieces meet at whole bytes
_MAX_EXPERTS = 1024
_MAX_TOP_K = 64
_TABLES = 64  # Kept at a time; a model needs fewer than sixteen.


def rows_with_duplicates(rows: np.ndarray) -> np.ndarray:
    """bool `[rows]`: True where `[rows, top_k]` names an id twice. Local."""
    found = np.empty(len(rows), dtype=np.bool_)
    for begin in range(0, len(rows), _PIECE):
        piece = rows[begin : begin + _PIECE]
        found[begin : begin + _PIECE] = _duplicates(_sorted_columns(piece))
    return found


def same_sets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool `[rows]`: True where two `[rows, top_k]` name the same ids, in any order. Local."""
    same = np.empty(len(a), dtype=np.bool_)
    for begin in range(0, len(a), _PIECE):
        piece = slice(begin, begin + _PIECE)
        same[piece] = (_sorted_columns(a[piece]) == _sorted_columns(b[piece])).all(axis=0)
    return same


class SetCode:
    """The code of `top_k` different ids out of `num_experts`.

    Raises:
        UnsupportedError: more than 1024 experts, whose tables would not stay in a cache; or top_k
            above 64 or above the number of experts.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        if num_experts > _MAX_EXPERTS:
            raise UnsupportedError(
                f"dense coding handles up to {_MAX_EXPERTS} experts; got {num_experts}."
                ' Use coding="raw".'
            )
        if not 1 <= top_k <= min(num_experts, _MAX_TOP_K):
            raise UnsupportedError(
                f"dense coding handles 1 to {min(num_experts, _MAX_TOP_K)} of {num_experts}"
                f' experts; got top_k {top_k}. Use coding="raw".'
            )
        self._itemsize = 1 if num_experts <= 256 else 2
        largest = 8 // self._itemsize
        count = -(-top_k // largest)
        sizes = [(top_k + i) // count for i in range(count)]
        self._groups = [_Group(num_experts, size, self._itemsize) for size in sizes]
        self.bits = sum(group.bits for group in self._groups)
        """Bits of one row."""

    def nbytes(self, rows: int) -> int:
        """Bytes of the code of `rows` rows."""
        return sum(group.nbytes(rows) for group in self._groups)

    def encode(self, rows: np.ndarray, *, skip: np.ndarray) -> np.ndarray:
        """uint8 code of `[rows, top_k]` ids. Their order is lost. Local.

        Args:
            skip: bool `[rows]`; True where the ids do not matter and may be no set.

        Raises:
            UsageError: another row names an id twice.
        """
        code = np.empty(self.nbytes(len(rows)), dtype=np.uint8)
        outs = self._fields(code, len(rows))
        for begin in range(0, len(rows), _PIECE):
            end = min(begin + _PIECE, len(rows))
            columns = _sorted_columns(rows[begin:end])
            twice = _duplicates(columns) & ~skip[begin:end]
            if twice.any():
                row = begin + int(twice.argmax())
                raise UsageError(
                    f"row {row} names an expert twice, {rows[row].tolist()}: dense coding holds"
                    ' sets. Use coding="raw".'
                )
            first = 0
            for group, (whole, planes) in zip(self._groups, outs, strict=True):
                numbers = group.numbers(columns[first : first + group.size])
                first += group.size
                _write(numbers, whole[begin:end], planes[:, begin // 8 : -(-end // 8)])
        return code

    def decode(self, code: np.ndarray, rows: int) -> np.ndarray:
        """`[rows, top_k]` ids in rising order. Local.

        Raises:
            CorruptionError: a number is no set, or there are bits behind the last row.
        """
        ids = np.empty((rows, sum(group.size for group in self._groups)), f"<u{self._itemsize}")
        fields = self._fields(code, rows)
        behind = 0xFF >> rows % 8 if rows % 8 else 0
        if any((planes[:, -1:] & behind).any() for _, planes in fields):
            raise CorruptionError(f"the code goes on behind its {rows} rows")
        for begin in range(0, rows, _PIECE):
            end = min(begin + _PIECE, rows)
            first = 0
            for group, (whole, planes) in zip(self._groups, fields, strict=True):
                numbers = _read(whole[begin:end], planes[:, begin // 8 : -(-end // 8)])
                ids[begin:end, first : first + group.size] = group.ids(numbers)
                first += group.size
        return ids

    def _fields(self, code: np.ndarray, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        fields = []
        for group in self._groups:
            own, code = code[: group.nbytes(rows)], code[group.nbytes(rows) :]
            whole, spare = divmod(group.bits, 8)
            fields.append(
                (
                    own[: rows * whole].reshape(rows, whole),
                    own[rows * whole :].reshape(spare, -(-rows // 8)),
                )
            )
        return fields


class _Group:
    """Neighbouring ids of a sorted row, few enough for a float64 and a word."""

    def __init__(self, num_experts: int, size: int, itemsize: int) -> None:
        self.size = size
        self._num_experts = num_experts
        self._itemsize = itemsize
        self._sets = math.comb(num_experts, size)
        assert self._sets < 1 << 52
        self.bits = max(size, (self._sets - 1).bit_length())

    def nbytes(self, rows: int) -> int:
        whole, spare = divmod(self.bits, 8)
        return rows * whole + spare * -(-rows // 8)

    def numbers(self, columns: np.ndarray) -> np.ndarray:
        """int64 `[rows]` of sorted ids `[size, rows]`."""
        total = columns[0].astype(np.int64)
        term = np.empty_like(total)
        for k in range(2, self.size + 1):
            np.take(
                _binomials(self._num_experts, k).astype(np.int64),
                columns[k - 1],
                out=term,
                mode="clip",
            )
            total += term
        return total

    def ids(self, numbers: np.ndarray) -> np.ndarray:
        """The inverse of `numbers`, ids `[rows, size]`."""
        if len(numbers) and int(numbers.max()) >= self._sets:
            raise CorruptionError(f"{int(numbers.max())} is no set: there are {self._sets}")
        rest = numbers.astype(np.float64)
        word = np.zeros_like(numbers)
        above, below = np.empty_like(rest), np.empty_like(rest)
        index, largest = np.empty_like(numbers), np.empty_like(numbers)
        for k in range(self.size, 1, -1):
            binomials = _binomials(self._num_experts, k)
            shift, first, guess = _guesses(self._num_experts, k)
            np.right_shift(rest.view(np.int64), shift, out=index)
            index -= first
            np.take(guess, index, out=largest, mode="clip")
            np.take(binomials, largest, out=above, mode="clip")
            # The guess is right or one too high: -1 where the difference is negative.
            np.subtract(rest, above, out=below)
            np.right_shift(below.view(np.int64), 63, out=index)
            largest += index
            np.take(binomials, largest, out=above, mode="clip")
            rest -= above
            np.left_shift(largest, 8 * self._itemsize * (k - 1), out=largest)
            word |= largest
        word |= rest.astype(np.int64)
        return word.view(f"<u{self._itemsize}").reshape(len(numbers), -1)[:, : self.size]


@lru_cache(_TABLES)
def _binomials(num_experts: int, k: int) -> np.ndarray:
    """float64 `C(c, k)` for c in 0..num_experts; exact below 2**53."""
    return np.array([math.comb(c, k) for c in range(num_experts + 1)], dtype=np.float64)


@lru_cache(_TABLES)
def _guesses(num_experts: int, k: int) -> tuple[int, int, np.ndarray]:
    """A table by exponent and leading bits of a float64: the first c that may be too high.

    Enough leading bits that no entry spans two of the binomials, so one comparison settles it.
    """
    binomials = _binomials(num_experts, k)
    bits = binomials[k:].view(np.int64)
    shift = 51
    while (np.diff(bits >> shift) == 0).any():
        shift -= 1
    # One entry more in front, for the number 0.
    first, last = int(bits[0] >> shift) - 1, int(bits[-1] >> shift)
    starts = (np.arange(first, last + 1, dtype=np.int64) << shift).view(np.float64)
    starts[0] = 0.0
    return shift, first, np.searchsorted(binomials, starts, side="right").astype(np.int64)


def _sorted_columns(rows: np.ndarray) -> np.ndarray:
    """`[top_k, rows]`: each row of `[rows, top_k]` in rising order."""
    columns = rows.T.copy()
    low = np.empty_like(columns[:1])[0] if len(columns) else columns
    for a, b in _network(len(columns)):
        np.minimum(columns[a], columns[b], out=low)
        np.maximum(columns[a], columns[b], out=columns[b])
        columns[a] = low
    return columns


def _duplicates(columns: np.ndarray) -> np.ndarray:
    twice = np.zeros(columns.shape[1], dtype=np.bool_)
    for low, high in pairwise(columns):
        twice |= low == high
    return twice


@cache
def _network(width: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort: the pairs to compare, in order."""
    pairs = []
    p = 1
    while p < width:
        k = p
        while k:
            for j in range(k % p, width - k, 2 * k):
                for i in range(min(k, width - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return tuple(pairs)


def _write(numbers: np.ndarray, whole: np.ndarray, planes: np.ndarray) -> None:
    width = whole.shape[1]
    whole[...] = numbers.view(np.uint8).reshape(-1, 8)[:, :width]
    for bit, plane in enumerate(planes):
        plane[...] = np.packbits((numbers >> (8 * width + bit)).astype(np.uint8) & 1)


def _read(whole: np.ndarray, planes: np.ndarray) -> np.ndarray:
    rows, width = whole.shape
    # Eight bytes from each place where a number begins, the foreign ones masked away: copying
    # `width` bytes at a time costs ten times as much.
    padded = np.zeros(rows * width + 8, dtype=np.uint8)
    padded[:-8] = whole.reshape(-1)
    words = np.lib.stride_tricks.as_strided(padded[:8].view("<i8"), (rows,), (width,))
    numbers = words & ((1 << (8 * width)) - 1)
    for bit, plane in enumerate(planes):
        ones = np.unpackbits(plane, count=rows).astype(np.int64)
        numbers |= ones << (8 * width + bit)
    return numbers


@lru_cache
def far_apart(num_experts: int) -> np.ndarray:
    """All experts, neighbours far apart: their bits reversed (van der Corput's sequence)."""
    bits = (num_experts - 1).bit_length()
    index = np.arange(1 << bits)
    turned = sum(((index >> bit) & 1) << (bits - 1 - bit) for bit in range(bits)) + 0 * index
    return turned[turned < num_experts]


def refuse_duplicates(array: np.ndarray, missing: np.ndarray) -> None:
    tokens, layers, top_k = array.shape
    twice = rows_with_duplicates(array.reshape(-1, top_k)).reshape(tokens, layers)
    twice &= ~missing[:, None]
    if twice.any():
        token, layer = (int(i) for i in np.argwhere(twice)[0])
        raise UsageError(
            f"{int(twice.sum())} rows name an expert twice, first token {token} of layer position"
            f" {layer}: {array[token, layer].tolist()}. An engine compiled before its capture was"
            " bound returns zeros (run it eagerly); dense layers must be left out."
        )
