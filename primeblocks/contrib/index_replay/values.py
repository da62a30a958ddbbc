"""Positions that an indexer selected, as a value, and the agreement of two selections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ShapeError, UsageError
from ...replay.codec import Bytes
from . import code

__all__ = ["IndexAgreement", "Indices", "compare"]


@dataclass(frozen=True, eq=False)
class Indices:
    """The positions that each token attended to, in each layer with its own indexer.

    The arrays are read-only numpy arrays on the host. A slice is a view. Positions count from the
    start of the token's document, as in an engine, even if the trainer packs documents. Layers that
    use the selection of another layer are left out. An unknown row is marked as missing, and
    `impose` keeps the model's own selection for a missing row.

    Args:
        ids: int32 `[tokens, layers, top_k]`, positions of tokens. The ids of each row ascend, and
            -1 fills the remaining columns. An id is at most the token's own position.
        positions: int32 `[tokens]`, the position of each token in its document, counted from 0.
        layer_ids: for each layer in `ids`, its index among all hidden layers.
        missing: bool `[tokens, layers]`, True for missing rows. All ids of a missing row are -1.

    Raises:
        ShapeError: shapes or dtypes do not fit together. The values are not checked, so use
            `from_array` for ids that another program made.
    """

    ids: np.ndarray
    positions: np.ndarray
    layer_ids: tuple[int, ...]
    missing: np.ndarray

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.ids.dtype != np.int32 or not self.ids.shape[2]:
            raise ShapeError(
                f"ids must be int32 [tokens, layers, top_k]; got {_kind(self.ids)}."
                " Use Indices.from_array."
            )
        tokens, layers, _ = self.ids.shape
        if len(self.layer_ids) != layers or len(set(self.layer_ids)) != layers:
            raise ShapeError(f"layer_ids must be {layers} distinct ids; got {self.layer_ids}.")
        if self.positions.shape != (tokens,) or self.positions.dtype != np.int32:
            raise ShapeError(f"positions must be int32 [{tokens}]; got {_kind(self.positions)}.")
        if self.missing.shape != (tokens, layers) or self.missing.dtype != np.bool_:
            raise ShapeError(
                f"missing must be bool [{tokens}, {layers}]; got {_kind(self.missing)}."
            )
        for name in ("ids", "positions", "missing"):
            object.__setattr__(self, name, _read_only(getattr(self, name)))

    @classmethod
    def from_array(
        cls,
        array: Any,
        *,
        layer_ids: Sequence[int],
        positions: Any = None,
        top_k: int | None = None,
        missing: Any = None,
    ) -> Indices:
        """Check and sort ids that another program made. Local.

        The ids of a row may have any order, and -1 means no id.

        Args:
            array: integers `[tokens, layers, width]`, an array or a tensor.
            layer_ids: as in `Indices`.
            positions: integers `[tokens]`. By default, the tokens are the first tokens of one
                document.
            top_k: the largest number of ids per row. The default is the width of `array`.
            missing: bool `[tokens]` or `[tokens, layers]`, True for missing rows.

        Raises:
            ShapeError: shapes or dtypes do not fit together, or a row has more than `top_k` ids.
            UsageError: a row has an id twice, an id above the token's own position, or a number
                below -1.
        """
        ids = _host(array)
        if ids.ndim != 3 or ids.dtype.kind not in "iu":
            raise ShapeError(
                f"indices need an integer array [tokens, layers, width]; got {_kind(ids)}."
            )
        tokens, layers, width = ids.shape
        places = np.arange(tokens) if positions is None else _host(positions)
        if places.shape != (tokens,) or places.dtype.kind not in "iu":
            raise ShapeError(f"positions must be integers [{tokens}]; got {_kind(places)}.")
        if tokens and not 0 <= places.min() <= places.max() < np.iinfo(np.int32).max:
            raise UsageError(
                f"positions must fit in 0..2**31 - 2; got {places.min()}..{places.max()}."
            )
        unknown = np.zeros(tokens, dtype=np.bool_) if missing is None else _host(missing)
        if unknown.shape == (tokens,):
            unknown = np.repeat(unknown[:, None], layers, axis=1)
        if unknown.shape != (tokens, layers) or unknown.dtype != np.bool_:
            raise ShapeError(
                f"missing must be bool [{tokens}] or [{tokens}, {layers}]; got {_kind(unknown)}."
            )
        ids = np.where(unknown[:, :, None], -1, ids)
        _check_range(ids, places)
        ids = _compact(ids.astype(np.int32))
        _check_distinct(ids)
        top_k = width if top_k is None else top_k
        if top_k < 1:
            raise ShapeError(f"top_k must be at least 1; got {top_k}.")
        if (longest := int((ids >= 0).sum(axis=-1).max(initial=0))) > top_k:
            raise ShapeError(f"a row holds {longest} ids, more than top_k={top_k}.")
        fitted = np.full((tokens, layers, top_k), -1, dtype=np.int32)
        fitted[:, :, :width] = ids[:, :, :top_k]
        return cls(fitted, places.astype(np.int32), tuple(int(i) for i in layer_ids), unknown)

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids.shape[2]

    def __len__(self) -> int:
        return self.tokens

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Indices):
            return NotImplemented
        return self.layer_ids == other.layer_ids and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("ids", "positions", "missing")
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Indices(tokens={self.tokens}, layer_ids={self.layer_ids}, top_k={self.top_k},"
            f" missing={int(self.missing.sum())})"
        )

    def __getitem__(self, tokens: slice) -> Indices:
        """`indices[a:b]`: a view of the tokens a to b - 1, which keep their positions."""
        return self._with(self.ids[tokens], self.positions[tokens], self.missing[tokens])

    @staticmethod
    def join(parts: Iterable[Indices]) -> Indices:
        """Join parts along the tokens, such as packed documents or turns, with one copy.

        Raises:
            ShapeError: the parts differ in layers or `top_k`, or `parts` is empty.
        """
        parts = list(parts)
        if not parts:
            raise ShapeError(
                "cannot join an empty list, because it has no layers. Pass indices[0:0]."
            )
        first = parts[0]
        for part in parts[1:]:
            first._check_model(part)
        return first._with(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("ids", "positions", "missing")
            )
        )

    def split(self, lengths: Sequence[int]) -> list[Indices]:
        """Split into views of consecutive tokens, the inverse of `join`.

        Raises:
            ShapeError: the lengths do not add up to the number of tokens.
        """
        if sum(lengths) != self.tokens or any(length < 0 for length in lengths):
            raise ShapeError(
                f"lengths add up to {sum(lengths)}, but there are {self.tokens} tokens. Add "
                "missing tokens with with_missing(), or correct the lengths."
            )
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        return [self[end - n : end] for n, end in zip(lengths, ends, strict=True)]

    def with_missing(self, *, before: int = 0, after: int = 0) -> Indices:
        """Add tokens with missing rows, before the first token and after the last token.

        Pass `after=1` for the last sampled token, which has no row. Pass `before=` for a prompt
        whose rows were not recorded. Pass `after=` for padding too.

        Raises:
            ShapeError: a count is negative, or `before` exceeds the first position.
        """
        first = int(self.positions[0]) if len(self) else before
        last = int(self.positions[-1]) if len(self) else before - 1
        if before < 0 or after < 0 or before > first:
            raise ShapeError(
                f"cannot add before={before} and after={after} missing tokens to positions "
                f"{first}..{last}. Pass 0 or more, and before <= {first}."
            )
        added = np.arange(first - before, first), np.arange(last + 1, last + 1 + after)
        positions = np.concatenate([added[0], self.positions, added[1]]).astype(np.int32)
        around = ((before, after), (0, 0))
        ids = np.pad(self.ids, (*around, (0, 0)), constant_values=-1)
        return self._with(ids, positions, np.pad(self.missing, around, constant_values=True))

    def take(self, order: Any) -> Indices:
        """Return the tokens at the indices `order`, such as one rank's part of a split sequence.

        Args:
            order: indices of tokens, or a bool mask `[tokens]`, as an array, a tensor or a list.

        Raises:
            ShapeError: an index is out of range or not an integer, or the length of a mask is not
                the number of tokens.
        """
        index = np.asarray(_host(order))
        if index.dtype == np.bool_ and index.shape == (self.tokens,):
            index = np.flatnonzero(index)
        index = index if index.size else index.astype(np.int64)
        whole = index.ndim == 1 and index.dtype.kind in "iu"
        if not whole or (index.size and not 0 <= index.min() <= index.max() < self.tokens):
            raise ShapeError(
                f"an order must be a list of indices in 0..{self.tokens - 1} or a bool mask"
                f" [{self.tokens}]; got {_kind(index)}."
            )
        return self._with(self.ids[index], self.positions[index], self.missing[index])

    def pack(self) -> memoryview:
        """Return one self-describing, checksummed buffer, coded without loss. Local.

        The module `code` describes the format. A memoryview cannot be pickled, so pass
        `bytes(payload)` to code that pickles the result.
        """
        return code.encode(self.ids, self.positions, self.layer_ids, self.missing)

    @classmethod
    def unpack(cls, payload: Bytes, *, max_bytes: int | None = None) -> Indices:
        """Return the value that `pack` packed. Local.

        Args:
            max_bytes: the largest memory that the ids may need, in bytes. A row that selects its
                whole prefix takes no bytes in the payload, so a small payload from a stranger may
                need unlimited memory.

        Raises:
            CorruptionError: a byte was changed, added or removed.
            UnsupportedError: the payload has an unknown version of the format.
            CapacityError: the ids need more memory than `max_bytes`.
        """
        return cls(*code.decode(payload, max_bytes=max_bytes))

    def _check_model(self, other: Indices) -> None:
        if (other.layer_ids, other.top_k) != (self.layer_ids, self.top_k):
            raise ShapeError(f"{other} and {self} differ in layers or top_k.")

    def _with(self, ids: np.ndarray, positions: np.ndarray, missing: np.ndarray) -> Indices:
        return Indices(ids, positions, self.layer_ids, missing)


@dataclass(frozen=True)
class IndexAgreement:
    """Agreement of two selections of the same tokens, by layer.

    Attributes:
        equal_rows: for each layer, the fraction of rows with equal ids.
        overlap: for each layer, the mean over rows of this ratio: the number of common ids, divided
            by the number of ids of the larger row.
        rows: for each layer, the number of rows that `compare` counted.
    """

    equal_rows: dict[int, float]
    overlap: dict[int, float]
    rows: dict[int, int]


def compare(one: Indices, other: Indices) -> IndexAgreement:
    """Compare two selections. Local.

    A row counts only if both selections have the row. The row's token must also be able to attend
    to more tokens than the larger `top_k` of the two selections.

    Raises:
        ShapeError: the selections differ in the positions of tokens or in layers.
    """
    same = one.layer_ids == other.layer_ids and np.array_equal(one.positions, other.positions)
    if not same:
        raise ShapeError(f"{one} and {other} differ in tokens or layers.")
    equal, overlap, counts = {}, {}, {}
    chosen = one.positions + 1 > max(one.top_k, other.top_k)
    for column, layer in enumerate(one.layer_ids):
        known = chosen & ~(one.missing[:, column] | other.missing[:, column])
        shared = [
            (len(np.intersect1d(a[a >= 0], b[b >= 0], assume_unique=True)),
             max((a >= 0).sum(), (b >= 0).sum()))
            for a, b in zip(one.ids[known, column], other.ids[known, column], strict=True)
        ]  # fmt: skip
        counts[layer] = len(shared)
        both = np.array(shared, dtype=np.float64).reshape(-1, 2)
        part = both[:, 0] / np.maximum(both[:, 1], 1)
        equal[layer] = float((part == 1).mean()) if len(part) else 1.0
        overlap[layer] = float(part.mean()) if len(part) else 1.0
    return IndexAgreement(equal, overlap, counts)


def _host(values: Any) -> np.ndarray:
    # Takes tensors of any device, without importing torch for them.
    detach = getattr(values, "detach", None)
    return np.asarray(values if detach is None else detach().cpu())


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _compact(ids: np.ndarray) -> np.ndarray:
    """Return each row in ascending order, followed by -1."""
    last = np.iinfo(np.int32).max
    ids = np.sort(np.where(ids < 0, last, ids), axis=-1)
    return np.where(ids == last, -1, ids)


def _check_range(ids: np.ndarray, positions: np.ndarray) -> None:
    wrong = (ids < -1) | (ids > positions[:, None, None])
    if wrong.any():
        token, layer, column = np.argwhere(wrong)[0]
        raise UsageError(
            f"token {token}, layer position {layer}: id {ids[token, layer, column]} is outside"
            f" 0..{positions[token]}, which ends at the token itself. Pass ids inside the token's"
            " document, without masked places."
        )


def _check_distinct(ids: np.ndarray) -> None:
    twice = (ids[:, :, 1:] == ids[:, :, :-1]) & (ids[:, :, 1:] >= 0)
    if twice.any():
        token, layer, column = np.argwhere(twice)[0]
        raise UsageError(
            f"{int(twice.any(axis=-1).sum())} rows have an id twice. The first is token {token},"
            f" layer position {layer}, with id {ids[token, layer, column]}."
        )
