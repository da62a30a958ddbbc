"""Which rank writes which box of which tensor, and where it lands. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from ..errors import PlanError, UnsupportedError
from ..layout import Shard
from .cover import cut, owned_boxes
from .manifest import Manifest

__all__ = ["Bucket", "Copy", "Plan", "check_pair", "plan_sync", "runs_of"]

# Converted into one another by the sender; every other dtype has to match.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SMALLEST_BUCKET_BYTES = 64


@dataclass(frozen=True)
class Copy:
    """A box of a target tensor; the writer holds it. `offset` is its first byte in the blob."""

    name: str
    box: Shard
    offset: int
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Bytes of one transfer: copies of one rank with one digest over them, in this order."""

    rank: int
    copies: tuple[Copy, ...]

    @property
    def bytes(self) -> int:
        return sum(copy.bytes for copy in self.copies)


@dataclass(frozen=True)
class Plan:
    """How the shards of `world_size` ranks become one blob of whole target tensors.

    `offsets` says where each tensor starts. Wider dtypes come first, so that every tensor is
    aligned to its element and the blob has no padding: each byte belongs to exactly one copy.
    """

    target: Manifest
    world_size: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Name -> first byte in the blob."""
        offsets, end = {}, 0
        for name in sorted(self.target, key=lambda name: -self.target[name].dtype.itemsize):
            offsets[name] = end
            end += _tensor_bytes(self.target, name)
        return offsets

    @property
    def bytes_total(self) -> int:
        """Bytes that the ranks write for one version."""
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that any lossless plan has to move: each target element once."""
        return sum(_tensor_bytes(self.target, name) for name in self.target)

    def of_rank(self, rank: int) -> tuple[Bucket, ...]:
        """The buckets that one rank writes, in blob order."""
        return tuple(bucket for bucket in self.buckets if bucket.rank == rank)

    def table(self) -> str:
        """Bytes, buckets and copies for each rank, and the total against its lower bound."""
        lines = [f"{'rank':>5} {'buckets':>8} {'copies':>8} {'bytes':>16}"]
        for rank in range(self.world_size):
            mine = self.of_rank(rank)
            copies, size = sum(len(b.copies) for b in mine), sum(b.bytes for b in mine)
            lines.append(f"{rank:>5} {len(mine):>8} {copies:>8} {size:>16,}")
        copies = sum(len(b.copies) for b in self.buckets)
        lines.append(f"{'all':>5} {len(self.buckets):>8} {copies:>8} {self.bytes_total:>16,}")
        lines.append(f"lower bound {self.lower_bound_bytes:,} bytes, {len(self.target)} tensors")
        return "\n".join(lines)

    def to_json(self) -> str:
        """A text that `from_json` turns into an equal plan."""
        buckets = [
            [b.rank, [[c.name, c.box.offsets, c.box.sizes] for c in b.copies]] for b in self.buckets
        ]
        head = {"target": self.target.to_json(), "world_size": self.world_size, "buckets": buckets}
        return json.dumps(head, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        head = json.loads(text)
        bare = cls(Manifest.from_json(head["target"]), head["world_size"], ())
        buckets = tuple(
            Bucket(
                rank, tuple(_copy(bare, name, Shard(tuple(at), tuple(n))) for name, at, n in copies)
            )
            for rank, copies in head["buckets"]
        )
        return cls(bare.target, bare.world_size, buckets)

    def fingerprint(self) -> str:
        """32 hex digits; sender and receiver compare them before a byte is used."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]


def _tensor_bytes(manifest: Manifest, name: str) -> int:
    return prod(manifest[name].shape) * manifest[name].dtype.itemsize


def plan_sync(sources: Sequence[Manifest], target: Manifest, *, bucket_bytes: int) -> Plan:
    """Plan the way of every target element from one rank that holds it. Pure.

    Nothing is gathered: each rank writes parts of its own shards. Where several ranks hold the
    same box, the one with the least to write gets it. Floats are converted to the target's dtype
    by the sender.

    Args:
        sources: one manifest a trainer rank, by rank. Names that the target lacks are ignored.
        target: what the engine wants: whole tensors, in the order it shall receive them.
        bucket_bytes: the most bytes under one digest.

    Raises:
        PlanError: a name is missing, a shape or dtype does not fit, or no rank holds some box.
        UnsupportedError: a target tensor is sharded.
    """
    if bucket_bytes < _SMALLEST_BUCKET_BYTES:
        raise PlanError(f"bucket_bytes is {bucket_bytes}; give at least {_SMALLEST_BUCKET_BYTES}")
    _check(sources, target)
    bare = Plan(target, len(sources), ())
    loads = [0] * len(sources)
    copies: dict[int, list[Copy]] = defaultdict(list)
    shared: list[tuple[Copy, tuple[int, ...]]] = []
    for copy, holders in _pieces(sources, bare, bucket_bytes):
        if len(holders) == 1:
            loads[holders[0]] += copy.bytes
            copies[holders[0]].append(copy)
        else:
            shared.append((copy, holders))
    # Largest first: what is left to level out the ranks at the end is small.
    for copy, holders in sorted(shared, key=lambda item: (-item[0].bytes, item[0].offset)):
        rank = min(holders, key=lambda rank: (loads[rank], rank))
        loads[rank] += copy.bytes
        copies[rank].append(copy)
    buckets = [
        Bucket(rank, run)
        for rank in range(len(sources))
        for run in runs_of(sorted(copies[rank], key=lambda copy: copy.offset), bucket_bytes)
    ]
    return Plan(target, len(sources), tuple(buckets))


def _pieces(
    sources: Sequence[Manifest], bare: Plan, limit: int
) -> Iterator[tuple[Copy, tuple[int, ...]]]:
    """Every piece of at most `limit` bytes with the ranks that could send it."""
    for name in bare.offsets:
        spec = bare.target[name]
        held = [
            (rank, source[name].layout.shard)
            for rank, source in enumerate(sources)
            if name in source
        ]
        boxes, uncovered = owned_boxes(held, spec.shape)
        if uncovered:
            missing = sum(box.numel for box in uncovered)
            raise PlanError(
                f"no rank holds {missing} of {prod(spec.shape)} elements of {name!r}, "
                f"first {uncovered[0]}. Got {len(sources)} manifests; pass one a trainer rank."
            )
        for box, holders in boxes:
            for piece in cut(box, max(1, limit // spec.dtype.itemsize)):
                yield _copy(bare, name, piece), holders


def _copy(bare: Plan, name: str, box: Shard) -> Copy:
    spec = bare.target[name]
    first = 0
    for size, offset in zip(spec.shape, box.offsets, strict=True):
        first = first * size + offset
    itemsize = spec.dtype.itemsize
    return Copy(name, box, bare.offsets[name] + first * itemsize, box.numel * itemsize)


def runs_of(copies: Iterable[Copy], limit: int) -> Iterator[tuple[Copy, ...]]:
    """Copies one after the other, in runs of at most `limit` bytes. Pure."""
    run: list[Copy] = []
    size = 0
    for copy in copies:
        if run and size + copy.bytes > limit:
            yield tuple(run)
            run, size = [], 0
        run.append(copy)
        size += copy.bytes
    if run:
        yield tuple(run)


def _check(sources: Sequence[Manifest], target: Manifest) -> None:
    if not sources or not target or not sum(_tensor_bytes(target, name) for name in target):
        raise PlanError(f"nothing to plan: {len(sources)} sources, {len(target)} target tensors")
    held = {name for source in sources for name in source}
    missing = [name for name in target if name not in held]
    if missing:
        raise PlanError(
            f"no rank holds {len(missing)} of {len(target)} target tensors: "
            f"{', '.join(missing[:3])}. The trainer has {len(held)} names, "
            f"such as {', '.join(sorted(held)[:3])}. Rename one side, or drop them from the target."
        )
    for name, spec in target.items():
        if not spec.layout.is_whole:
            raise UnsupportedError(
                f"target {name!r} is sharded: {spec.layout}. "
                "Every engine rank reads whole tensors; use target.whole()."
            )
        for rank, source in enumerate(sources):
            if name in source:
                check_pair(name, rank, source, target)


def check_pair(name: str, rank: int, source: Manifest, target: Manifest) -> None:
    """Raises: PlanError: another shape, or a dtype that is not converted."""
    have, want = source[name], target[name]
    if have.shape != want.shape:
        raise PlanError(
            f"{name!r} is {have.shape} on rank {rank} and {want.shape} in the target. "
            "Reshape or split it on the trainer before describing it."
        )
    if have.dtype != want.dtype and not {have.dtype, want.dtype} <= set(_FLOATS):
        raise PlanError(
            f"{name!r} is {have.dtype} on rank {rank} and {want.dtype} in the target; "
            f"only {', '.join(str(d) for d in _FLOATS)} are converted. Match the dtypes."
        )
