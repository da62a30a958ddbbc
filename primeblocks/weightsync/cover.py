"""Boxes: the ranks that own each part of a tensor, and small cuts of one. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product

from ..layout import Shard

__all__ = ["cut", "owned_boxes"]


def owned_boxes(
    held: Iterable[tuple[int, Shard]], shape: tuple[int, ...]
) -> tuple[list[tuple[Shard, tuple[int, ...]]], list[Shard]]:
    """Split a tensor along every border of a held box.

    Returns the boxes with the ranks that hold each, then the boxes that nobody holds. Together
    they tile `shape`. Where the held boxes are equal or disjoint, as sharding makes them, they are
    returned as they are.
    """
    ranks_of: dict[Shard, list[int]] = defaultdict(list)
    for rank, shard in held:
        if shard.numel:
            ranks_of[shard].append(rank)
    borders = [
        sorted(
            {0, size}
            | {box.offsets[dim] for box in ranks_of}
            | {box.offsets[dim] + box.sizes[dim] for box in ranks_of}
        )
        for dim, size in enumerate(shape)
    ]
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for box, ranks in ranks_of.items():
        spans = [
            range(bisect_left(edges, start), bisect_left(edges, start + size))
            for edges, start, size in zip(borders, box.offsets, box.sizes, strict=True)
        ]
        for cell in product(*spans):
            holders[cell].extend(ranks)
    owned, uncovered = [], []
    for cell in product(*(range(len(edges) - 1) for edges in borders)):
        edges = [(edge[i], edge[i + 1]) for edge, i in zip(borders, cell, strict=True)]
        box = Shard(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
        if cell in holders:
            owned.append((box, tuple(sorted(holders[cell]))))
        else:
            uncovered.append(box)
    return owned, uncovered


def cut(box: Shard, limit: int) -> Iterator[Shard]:
    """Cut a box into boxes of at most `limit` elements, along its first dims, in order."""
    if box.numel <= limit:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    size = box.sizes[dim]
    step = max(1, limit * size // box.numel)
    for start in range(0, size, step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(step, size - start)
        yield from cut(Shard(tuple(offsets), tuple(sizes)), limit)
