"""Plan which rank sends which box straight to which rank. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from ..errors import PlanError
from ..layout import Shard
from .cover import cut, owned_boxes
from .link_plan import DIGEST_BYTES, LinkBucket, LinkPlan, held_bytes
from .manifest import Manifest
from .plan import Copy, check_pair, runs_of

__all__ = ["plan_links"]

_SMALLEST_BUCKET_BYTES = 64


def plan_links(
    sources: Sequence[Manifest], targets: Sequence[Manifest], *, bucket_bytes: int
) -> LinkPlan:
    """Plan the way of every element that an engine rank wants, from one rank that holds it. Pure.

    Nothing is gathered: a rank is sent its own boxes and no others. Where several ranks hold the
    same box, the one with the least to send gets it, the largest boxes first. Floats are
    converted to the target's dtype by the sender.

    Args:
        sources: one manifest a trainer rank, by rank. Names that no target has are ignored.
        targets: one manifest an engine rank, by rank: its boxes. Engines that are replicas of
            each other each get theirs.
        bucket_bytes: the most bytes of a message, its digest included.

    Raises:
        PlanError: a name is missing, a shape or dtype does not fit, or no rank holds some box.
    """
    if bucket_bytes < _SMALLEST_BUCKET_BYTES:
        raise PlanError(f"bucket_bytes is {bucket_bytes}; give at least {_SMALLEST_BUCKET_BYTES}")
    _check(sources, targets)
    wanted = list(_wanted(sources, targets, bucket_bytes - DIGEST_BYTES))
    loads = [0] * len(sources)
    chosen: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    # Boxes with one holder first, then largest first: what is left to level out is small.
    wanted.sort(key=lambda item: (len(item[2]) > 1, -item[1].bytes))
    for receiver, copy, holders in wanted:
        sender = min(holders, key=lambda rank: (loads[rank], rank))
        loads[sender] += copy.bytes
        chosen[sender, receiver].append(copy)
    order = {name: i for i, name in enumerate(dict.fromkeys(n for t in targets for n in t))}
    links = {}
    for (sender, receiver), copies in sorted(chosen.items()):
        target = targets[receiver]
        copies.sort(key=lambda c: (-target[c.name].dtype.itemsize, order[c.name], c.box.offsets))
        links[sender, len(sources) + receiver] = list(runs_of(copies, bucket_bytes - DIGEST_BYTES))
    return LinkPlan(tuple(sources), tuple(targets), bucket_bytes, tuple(_rounds(links)))


def _wanted(
    sources: Sequence[Manifest], targets: Sequence[Manifest], limit: int
) -> Iterator[tuple[int, Copy, tuple[int, ...]]]:
    """(target rank, box of at most `limit` bytes, ranks that could send it)."""
    # Layers repeat: equal layouts are intersected once.
    alike: dict[tuple[object, ...], list[tuple[int, Shard, int, tuple[int, ...]]]] = {}
    for name in dict.fromkeys(name for target in targets for name in target):
        held = tuple((r, s[name].layout.shard) for r, s in enumerate(sources) if name in s)
        want = tuple(
            (r, t[name].layout.shard, t[name].dtype.itemsize)
            for r, t in enumerate(targets)
            if name in t
        )
        shape = next(t[name].shape for t in targets if name in t)
        key = (held, want, shape)
        if key not in alike:
            alike[key] = list(_boxes(name, held, want, shape, limit))
        for rank, box, itemsize, holders in alike[key]:
            yield rank, Copy(name, box, 0, box.numel * itemsize), holders


def _boxes(
    name: str,
    held: tuple[tuple[int, Shard], ...],
    want: tuple[tuple[int, Shard, int], ...],
    shape: tuple[int, ...],
    limit: int,
) -> Iterator[tuple[int, Shard, int, tuple[int, ...]]]:
    owned, uncovered = owned_boxes(held, shape)
    # Replicas want the same boxes: each is cut once.
    done: dict[tuple[Shard, int], list[tuple[Shard, tuple[int, ...]]]] = {}
    for rank, wanted, itemsize in want:
        missing = [box for cell in uncovered if (box := cell.intersect(wanted)) is not None]
        if missing:
            raise PlanError(
                f"no trainer rank holds {sum(box.numel for box in missing)} of the "
                f"{wanted.numel} elements of {name!r} that engine rank {rank} wants, first "
                f"{missing[0]}. Got {len(held)} ranks with that name; pass a manifest of each."
            )
        if (wanted, itemsize) not in done:
            done[wanted, itemsize] = [
                (piece, holders)
                for cell, holders in owned
                if (box := cell.intersect(wanted)) is not None
                for piece in cut(box, limit // itemsize)
            ]
        for piece, holders in done[wanted, itemsize]:
            yield rank, piece, itemsize, holders


def _rounds(links: dict[tuple[int, int], list[tuple[Copy, ...]]]) -> Iterator[LinkBucket]:
    """Give each bucket the first round in which both its ends are free.

    That takes less than twice the rounds of the rank with most buckets. Links take turns, and
    start at another sender for each receiver, so that not all want the same one.
    """
    senders = max(sender for sender, _ in links) + 1
    queue = sorted(
        (turn, (sender - receiver) % senders, sender, receiver)
        for (sender, receiver), runs in links.items()
        for turn in range(len(runs))
    )
    busy: dict[int, int] = defaultdict(int)  # A bit for each round.
    for turn, _, sender, receiver in queue:
        free = ~(busy[sender] | busy[receiver])
        bit = free & -free
        busy[sender] |= bit
        busy[receiver] |= bit
        copies, end = [], 0
        for copy in links[sender, receiver][turn]:
            copies.append(Copy(copy.name, copy.box, end, copy.bytes))
            end += copy.bytes
        yield LinkBucket(sender, receiver, bit.bit_length() - 1, tuple(copies))


def _check(sources: Sequence[Manifest], targets: Sequence[Manifest]) -> None:
    if not sources or not sum(held_bytes(target) for target in targets):
        raise PlanError(f"nothing to plan: {len(sources)} sources, {len(targets)} targets")
    held = _kinds(sources)
    wanted = _kinds(targets)
    missing = [name for name in wanted if name not in held]
    if missing:
        raise PlanError(
            f"no trainer rank holds {len(missing)} of {len(wanted)} names that engines want: "
            f"{', '.join(missing[:3])}. The trainer has {len(held)} names, "
            f"such as {', '.join(sorted(held)[:3])}. Rename one side, or drop them from the target."
        )
    for name, kinds in wanted.items():
        shapes = {shape for shape, _ in kinds}
        if len(shapes) > 1:
            raise PlanError(f"engine ranks disagree about the global shape of {name!r}: {shapes}")
        for engine in kinds.values():
            for rank in held[name].values():
                check_pair(name, rank, sources[rank], targets[engine])


def _kinds(
    manifests: Sequence[Manifest],
) -> dict[str, dict[tuple[tuple[int, ...], torch.dtype], int]]:
    """Name -> (shape, dtype) -> a rank that has it so."""
    kinds: dict[str, dict[tuple[tuple[int, ...], torch.dtype], int]] = defaultdict(dict)
    for rank, manifest in enumerate(manifests):
        for name, spec in manifest.items():
            kinds[name].setdefault((spec.shape, spec.dtype), rank)
    return kinds
