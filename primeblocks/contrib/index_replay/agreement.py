"""Agreement of two selections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import ShapeError
from .values import Indices

__all__ = ["IndexAgreement", "compare"]


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
