"""The wire format of index sets, each coded as a difference from an earlier set. Little-endian.

`interpolative` codes the ranks of the members to remove and to add. It also codes whole sets
without a near relative. A set that holds its whole prefix costs nothing. The envelope is that of
`codec`. Rows of the body come layer after layer.

    sizes       top_k, layers, tokens, documents, turns (32 bytes)
    layer ids   uint32 each
    documents   for each run of neighbours: the place of its first token, and its length
    turns       lengths of runs of rows, known and missing in turn
    short       for each known row: how many members it lacks
    distance    for each known row without its whole prefix: to its relative, or 0
    removed     for each row with a relative: how many members are removed
    sets        the ranks of removed members, then those of added members

Derivation and measurements: docs/replay_evidence.md, "Selections of an indexer".
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from ...errors import CapacityError, CorruptionError
from ...replay.codec import Bytes, seal, unseal
from .interpolative import decode_numbers, decode_sets, encode_numbers, encode_sets, ranges
from .relatives import Sets, apply, distances_of, history_of, tell

__all__ = ["DecodedIndices", "decode", "encode"]

_KIND, _FORMAT = b"PBIX", 1
_SIZES = struct.Struct("<IIQQQ")
_PIECE = 1 << 16  # members that are compared together


class DecodedIndices(NamedTuple):
    ids: np.ndarray
    positions: np.ndarray
    layer_ids: tuple[int, ...]
    missing: np.ndarray


class _Rows:
    """Rows layer after layer: which are known, what they may hold, and which of them choose.

    Args:
        positions: int64 `[tokens]`.
        known: bool `[layers * tokens]`.
    """

    def __init__(self, positions: np.ndarray, known: np.ndarray, layers: int, top_k: int) -> None:
        self.positions, self.known, self.layers, self.top_k = positions, known, layers, top_k
        self.places = np.tile(positions, layers) + 1
        self.most = np.minimum(self.places, top_k)

    @property
    def history(self) -> np.ndarray:
        return np.tile(history_of(self.positions), self.layers)

    def choosing(self, lengths: np.ndarray) -> np.ndarray:
        return np.flatnonzero(self.known & (lengths < self.places))


def encode(
    ids: np.ndarray, positions: np.ndarray, layer_ids: tuple[int, ...], missing: np.ndarray
) -> memoryview:
    """Write one contiguous buffer. Local.

    Args:
        ids: int32 `[tokens, layers, top_k]`, in the form of `Indices`.
        positions: int32 `[tokens]`.
        missing: bool `[tokens, layers]`.
    """
    tokens, layers, top_k = ids.shape
    flat = np.ascontiguousarray(ids.transpose(1, 0, 2)).reshape(-1, top_k)
    rows = _Rows(positions.astype(np.int64), ~missing.T.reshape(-1), layers, top_k)
    lengths = (flat >= 0).sum(axis=-1)
    chosen = rows.choosing(lengths)
    distance, go, come = _tell_all(flat, rows, chosen, tokens)
    starts = np.flatnonzero(np.diff(rows.positions, prepend=-2) != 1)
    turns = _turns_of(rows.known)
    numbers = (
        rows.positions[starts],
        np.diff(starts, append=tokens),
        turns,
        (rows.most - lengths)[rows.known],
        distance,
        go.counts[distance > 0],
    )
    return seal(
        _KIND,
        _FORMAT,
        [
            _SIZES.pack(top_k, layers, tokens, len(starts), len(turns)),
            np.asarray(layer_ids, dtype="<u4"),
            *map(encode_numbers, numbers),
            encode_sets(*Sets.join([go, come])),
        ],
    )


def _tell_all(
    flat: np.ndarray, rows: _Rows, chosen: np.ndarray, tokens: int
) -> tuple[np.ndarray, Sets, Sets]:
    distance = np.zeros(len(flat), dtype=np.int64)
    choosing = np.zeros(len(flat), dtype=np.bool_)
    choosing[chosen] = True
    history = history_of(rows.positions)
    for begin in range(0, len(flat), max(1, tokens)):
        layer = slice(begin, begin + tokens)
        found = distances_of(flat[layer], rows.known[layer], choosing[layer], history)
        distance[layer] = found
    go, come = [], []
    for piece in np.array_split(chosen, len(chosen) * flat.shape[1] // _PIECE + 1):
        back = distance[piece]
        relative = np.where(back[:, None] > 0, flat[piece - back], -1)
        goes, comes, told = tell(flat[piece], relative, rows.places[piece])
        distance[piece] *= told
        go.append(goes)
        come.append(comes)
    return distance[chosen], Sets.join(go), Sets.join(come)


def decode(payload: Bytes, *, max_bytes: int | None) -> DecodedIndices:
    """Read the result of `encode`. Local.

    Raises:
        CorruptionError: a byte was changed, added or removed.
        UnsupportedError: the payload has another version of the format.
        CapacityError: the ids would take more than `max_bytes`.
    """
    body = np.frombuffer(unseal(payload, kind=_KIND, format_version=_FORMAT), dtype=np.uint8)
    if len(body) < _SIZES.size:
        raise CorruptionError(
            f"a body of {len(body)} bytes is too short for the sizes of index sets. Fetch the "
            "bytes again."
        )
    top_k, layers, tokens, documents, turns = _SIZES.unpack_from(body)  # type: ignore[arg-type]
    if max_bytes is not None and 4 * top_k * layers * tokens > max_bytes:
        raise CapacityError(
            f"{tokens} tokens x {layers} layers x {top_k} ids take {4 * top_k * layers * tokens}"
            f" bytes; max_bytes is {max_bytes}."
        )
    layer_ids = body[_SIZES.size : _SIZES.size + 4 * layers]
    if len(layer_ids) != 4 * layers or not top_k or max(documents, turns) > 8 * len(body) + 64:
        raise CorruptionError(
            f"{len(body)} bytes are too few for {layers} layers of top {top_k}. Fetch the bytes "
            "again."
        )
    reader = _Reader(body[_SIZES.size + 4 * layers :])
    positions = reader.positions(documents, tokens)
    rows = _Rows(positions, reader.known(turns, tokens * layers), layers, top_k)
    ids = _read_rows(reader, rows).reshape(layers, tokens, top_k)
    return DecodedIndices(
        np.ascontiguousarray(ids.transpose(1, 0, 2)),
        positions.astype(np.int32),
        tuple(layer_ids.view("<u4").tolist()),
        np.ascontiguousarray(~rows.known.reshape(layers, tokens).T),
    )


def _read_rows(reader: _Reader, rows: _Rows) -> np.ndarray:
    lengths = np.zeros(len(rows.known), dtype=np.int64)
    lengths[rows.known] = rows.most[rows.known] - reader.numbers(int(rows.known.sum()))
    if (lengths < 0).any():
        raise CorruptionError(
            "the bytes are damaged: a row has a negative number of members. Fetch the bytes again."
        )
    chosen = rows.choosing(lengths)
    distance = reader.numbers(len(chosen))
    told = distance > 0
    relatives = chosen - distance
    if (distance > rows.history[chosen]).any() or not rows.known[relatives[told]].all():
        raise CorruptionError(
            "the bytes are damaged: a row is coded from a row that does not exist. Fetch the "
            "bytes again."
        )
    sizes = np.where(told, lengths[relatives], 0)
    removed = np.zeros(len(chosen), dtype=np.int64)
    removed[told] = reader.numbers(int(told.sum()))
    added = lengths[chosen] - (sizes - removed)
    members = reader.sets(
        np.concatenate([removed, added]), np.concatenate([sizes, rows.places[chosen] - sizes])
    )
    ids = np.full((len(rows.known), rows.top_k), -1, dtype=np.int32)
    whole = np.flatnonzero(rows.known & (lengths == rows.places))
    column = ranges(np.zeros_like(whole), lengths[whole])
    ids[np.repeat(whole, lengths[whole]), column] = column
    come = np.cumsum(added) - added + int(removed.sum())
    go = np.cumsum(removed) - removed
    for turn in _generations(chosen, relatives, told, *ids.shape):
        relative = np.where(told[turn, None], ids[relatives[turn]], -1)
        ids[chosen[turn]] = apply(
            relative,
            Sets(members[ranges(go[turn], removed[turn])], removed[turn], sizes[turn]),
            Sets(members[ranges(come[turn], added[turn])], added[turn], sizes[turn]),
        )
    return ids


def _generations(
    chosen: np.ndarray, relatives: np.ndarray, told: np.ndarray, rows: int, top_k: int
) -> list[np.ndarray]:
    """Return rows that can be decoded together, as indices into `chosen`, relatives first."""
    after = [0] * rows
    parents = np.where(told, relatives, -1).tolist()
    generation = np.zeros(len(chosen), dtype=np.int64)
    for index, (row, parent) in enumerate(zip(chosen.tolist(), parents, strict=True)):
        if parent >= 0:
            generation[index] = after[parent]
            after[row] = after[parent] + 1
        else:
            after[row] = 1
    order = np.argsort(generation, kind="stable")
    cuts = np.flatnonzero(np.diff(generation[order])) + 1
    return [
        piece
        for same in np.split(order, cuts)
        for piece in np.array_split(same, len(same) * top_k // _PIECE + 1)
    ]


class _Reader:
    """Reads the parts of a body in turn."""

    def __init__(self, data: np.ndarray) -> None:
        self._rest = data

    def numbers(self, count: int) -> np.ndarray:
        numbers, self._rest = decode_numbers(self._rest, count)
        return numbers

    def sets(self, counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        members, self._rest = decode_sets(self._rest, counts, sizes)
        if len(self._rest):
            raise CorruptionError(f"{len(self._rest)} bytes are left after the last set.")
        return members

    def positions(self, documents: int, tokens: int) -> np.ndarray:
        first, lengths = self.numbers(documents), self.numbers(documents)
        if lengths.sum() != tokens or (first + lengths > 1 << 31).any():
            raise CorruptionError(f"the coded documents do not add up to {tokens} tokens.")
        return ranges(first, lengths)

    def known(self, turns: int, rows: int) -> np.ndarray:
        lengths = self.numbers(turns)
        if lengths.sum() != rows:
            raise CorruptionError(f"the coded ranges of known rows do not add up to {rows} rows.")
        return np.repeat(np.arange(turns) % 2 == 0, lengths)


def _turns_of(known: np.ndarray) -> np.ndarray:
    """Return lengths of runs of True and False in turn, beginning with True."""
    cuts = np.flatnonzero(np.diff(known, prepend=True))
    return np.diff(cuts, prepend=0, append=len(known))
