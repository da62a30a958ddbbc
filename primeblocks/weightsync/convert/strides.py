"""Views as boxes: the places in a tensor of the elements of a view of it, told by its strides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from torch import Tensor

from ...layout import Shard
from .pieces import NEW, Piece, paired

__all__ = ["hull", "pieces_in"]

# Of a view that is no box. More are not worth their time.
_MOST_PIECES = 1024


def pieces_in(view: Tensor, base: Tensor) -> list[Piece] | None:
    """Return the pieces of `base`, dense in its storage, that a view is made of.

    Each dim of the view steps along a dim of `base`, or along several that are one behind the
    other; steps that are not one behind the other are pieces of their own. None where elements
    come twice, or pieces are too many.
    """
    if view.numel() == 0:
        return []
    (first, steps), (start, dims) = _in_bytes(view), _in_bytes(base)
    order = sorted((d for d, (n, _) in enumerate(dims) if n > 1), key=lambda d: -dims[d][1])
    left, at = first - start, [0] * len(dims)
    for d in order:
        at[d], left = divmod(left, dims[d][1])
    visits = _visits(steps, dims, order)
    if visits is None:
        return None
    last = [
        at[d] + sum((n - 1) * step for _, to, n, step, _ in visits if to == d)
        for d in range(len(dims))
    ]
    runs = {v: (d, n) for v, d, n, step, inner in visits if step == inner == 1}
    single = [visit for visit in visits if not visit[3] == visit[4] == 1]
    count = prod(visit[2] for visit in single)
    if (
        any(end >= n for end, (n, _) in zip(last, dims, strict=True))
        or len({d for d, _ in runs.values()}) < len(runs)
        or count > _MOST_PIECES
    ):
        return None
    lengths = dict(runs.values())
    base_sizes = tuple(lengths.get(d, 1) for d in range(len(dims)))
    repeated = {v: n for v, (n, stride) in enumerate(steps) if not stride}
    sizes = tuple(runs[v][1] if v in runs else repeated.get(v, 1) for v in range(len(steps)))
    # A part of an element is read with all of it.
    along = [runs[v][0] if v in runs else NEW for v in range(len(steps) - 1)]
    along = [NEW if d == len(dims) - 1 else d for d in along]
    ways = paired(along, base_sizes[:-1], sizes[:-1])
    found = []
    for index in product(*(range(n) for _, _, n, _, _ in single)):
        offsets, there = list(at), [0] * len(steps)
        for i, (v, d, _, step, inner) in zip(index, single, strict=True):
            offsets[d] += i * step
            there[v] += i * inner
        source = Shard(tuple(offsets[:-1]), base_sizes[:-1])
        found.append(Piece("", source, "", Shard(tuple(there[:-1]), sizes[:-1]), ways))
    return found


def hull(view: Tensor, base: Tensor) -> Shard:
    """Return a box of `base` that has all of a view in it: its first to its last row."""
    (first, steps), (start, dims) = _in_bytes(view), _in_bytes(base)
    last = first + sum((n - 1) * stride for n, stride in steps)
    outer = max(range(base.ndim), key=lambda d: (base.shape[d] > 1, dims[d][1]))
    row, end = (first - start) // dims[outer][1], (last - start) // dims[outer][1]
    offsets, sizes = [0] * base.ndim, list(base.shape)
    offsets[outer], sizes[outer] = row, end - row + 1
    return Shard(tuple(offsets), tuple(sizes))


def _in_bytes(tensor: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return the first byte of a tensor, and the size and stride of its dims, its bytes the last.

    In bytes, because a view may have another dtype than what it is a view of.
    """
    size = tensor.element_size()
    dims = [(n, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return int(tensor.storage_offset()) * size, [*dims, (size, 1)]


def _visits(
    steps: Sequence[tuple[int, int]], dims: Sequence[tuple[int, int]], order: Sequence[int]
) -> list[tuple[int, int, int, int, int]] | None:
    """Return the ways of a view's dims along those of its base.

    Each is a dim of the view, one of the base, the number of steps, and the length of one in
    either: in the base, then in the view.
    """
    found = []
    for v, (length, first) in enumerate(steps):
        inner, count, stride = 1, length, first
        while count > 1 and stride:
            d = next((d for d in order if dims[d][1] <= stride), None)
            if d is None or stride % dims[d][1]:
                return None
            size, unit = dims[d]
            step = stride // unit
            visited = count if (count - 1) * step < size else size // step
            if visited < count and (size % step or count % visited):
                return None
            found.append((v, d, visited, step, inner))
            inner, count, stride = inner * visited, count // visited, size * unit
    return found
