"""The plan as a value: the boxes that each rank writes and each reader wants. Pure."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from ..errors import PlanError
from ..layout import Layout, Shard
from .manifest import Manifest, as_plan_error, box_of

__all__ = ["Boxes", "Bucket", "Copy", "Plan", "cut", "owned_boxes", "packed"]

_MOST_RANKS = 1 << 16  # Bounds the loops over the ranks of a damaged text.

Boxes = Mapping[str, tuple[Shard, ...]]
"""Name -> disjoint boxes of that tensor."""


class Copy(NamedTuple):
    """A box of a tensor in a bucket. `offset` is the box's first byte in the bucket."""

    name: str
    box: Shard
    offset: int
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """The bytes of one transfer, under one digest. Trainer rank `rank` sends them to `readers`.

    Wider dtypes come first, so that elements are aligned.
    """

    rank: int
    readers: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def bytes(self) -> int:
        last = self.copies[-1]
        return last.offset + last.bytes


@dataclass(frozen=True)
class Plan:
    """Says which of `world_size` trainer ranks sends which box to which reader.

    Several processes may load as the same reader, except over a process group. Every wanted element
    is in exactly one bucket.

    Attributes:
        target: the names, the dtypes and the whole shapes of the tensors that are sent.
        wants: the boxes that each reader wants.
        bucket_bytes: the most bytes that a bucket may have.
        unsent: the names of the trainer's tensors that are not in `target`. If the plan was made
            with `convert`, `unsent` is empty, even if the conversion drops tensors. In
            that case, `convert.sources` contains all tensors of the trainer.
    """

    target: Manifest
    world_size: int
    wants: tuple[Boxes, ...]
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    unsent: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Plan of {len(self.target)} tensors, {self.world_size} ranks, "
            f"{len(self.wants)} readers, {len(self.buckets)} buckets of {self.bytes_total} bytes>"
        )

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The position of each tensor's first byte, by name, in a buffer of all whole tensors.

        Tensors of wider dtypes come first, without padding.
        """
        offsets, end = {}, 0
        for name in sorted(self.target, key=lambda name: -self.target[name].dtype.itemsize):
            offsets[name] = end
            end += self.target[name].bytes
        return offsets

    @cached_property
    def blob_bytes(self) -> int:
        """Bytes of all whole tensors."""
        return sum(spec.bytes for spec in self.target.values())

    @cached_property
    def bytes_total(self) -> int:
        """Bytes that trainer ranks write for one version. A box counts once for all its readers."""
        return sum(bucket.bytes for bucket in self.buckets)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that any lossless plan must write: every wanted element once."""
        total = 0
        for name, spec in self.target.items():
            wanted = [box for boxes in self.wants for box in boxes.get(name, ())]
            if Layout.whole(spec.shape).shard in wanted:
                total += spec.bytes
            else:
                cells, _ = owned_boxes(enumerate(dict.fromkeys(wanted)), spec.shape)
                total += sum(cell.numel for cell, _ in cells) * spec.dtype.itemsize
        return total

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the buckets that a trainer rank writes."""
        return self._places.get(("rank", rank), ())

    def of_reader(self, reader: int) -> tuple[int, ...]:
        """Return the indices of the buckets that a reader wants."""
        return self._places.get(("reader", reader), ())

    def written_bytes(self, rank: int) -> int:
        """Return the bytes that a trainer rank writes for one version."""
        return sum(self.buckets[index].bytes for index in self.of_rank(rank))

    def read_bytes(self, reader: int) -> int:
        """Return the bytes that a reader reads for one version."""
        return sum(self.buckets[index].bytes for index in self.of_reader(reader))

    def writer_peak_bytes(self, rank: int) -> int:
        """Return the extra bytes that a rank needs to send a full version over a process group.

        The rank needs at most two buckets in addition to its weights.
        """
        mine = self.of_rank(rank)
        messages = sum(len(self.buckets[index].readers) for index in mine)
        return min(2, messages) * self._largest(mine)

    def reader_peak_bytes(self, reader: int) -> int:
        """Return the extra bytes that a reader needs for a full version over a process group.

        The reader needs its boxes twice and at most two buckets in addition to the loaded weights.
        It keeps the boxes of the previous version until it has loaded the new version.
        """
        mine = self.of_reader(reader)
        return 2 * self.read_bytes(reader) + min(2, len(mine)) * self._largest(mine)

    def table(self) -> str:
        """Tabulate the bytes that ranks write and readers read, with the total and its lower bound.

        The column `peak` shows `writer_peak_bytes` of ranks and `reader_peak_bytes` of readers.
        """
        links = {(bucket.rank, reader) for bucket in self.buckets for reader in bucket.readers}
        lines = [f"{'':>12} {'links':>6} {'buckets':>8} {'copies':>8} {'bytes':>16} {'peak':>16}"]
        for rank in range(self.world_size):
            count, peak = sum(link[0] == rank for link in links), self.writer_peak_bytes(rank)
            lines.append(self._row(f"rank {rank}", self.of_rank(rank), count, peak))
        for reader in range(len(self.wants)):
            count, peak = sum(link[1] == reader for link in links), self.reader_peak_bytes(reader)
            lines.append(self._row(f"reader {reader}", self.of_reader(reader), count, peak))
        lines.append(self._row("written", range(len(self.buckets)), len(links)))
        lines.append(f"lower bound {self.lower_bound_bytes:,} bytes, {len(self.target)} tensors")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return a text that `from_json` turns into an equal plan."""
        names = list(self.target)
        place = {name: index for index, name in enumerate(names)}
        wants = [
            [[place[name], [_row(box) for box in boxes]] for name, boxes in boxes.items()]
            for boxes in self.wants
        ]
        buckets = [
            [b.rank, b.readers, [[place[c.name], *_row(c.box)] for c in b.copies]]
            for b in self.buckets
        ]
        head = {
            "target": self.target.to_json(),
            "world_size": self.world_size,
            "bucket_bytes": self.bucket_bytes,
            "wants": wants,
            "buckets": buckets,
            **({"unsent": self.unsent} if self.unsent else {}),
        }
        return json.dumps(head, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: `to_json` did not write this text.
        """
        with as_plan_error("a plan"):
            head = json.loads(text)
            target = Manifest.from_json(head["target"])
            names = list(target)
            wants = tuple(
                {
                    names[at]: tuple(_inside(target, names[at], row) for row in rows)
                    for at, rows in boxes
                }
                for boxes in head["wants"]
            )
            buckets = []
            for rank, to, copies in head["buckets"]:
                boxes = ((names[at], _inside(target, names[at], box)) for at, *box in copies)
                buckets.append(Bucket(int(rank), tuple(to), packed(target, boxes)))
            ranks, readers = int(head["world_size"]), {*range(len(wants))}
            fits = all(
                b.copies and 0 <= b.rank < ranks and {*b.readers} <= readers for b in buckets
            )
            if not (fits and 0 < ranks <= _MOST_RANKS):
                raise PlanError(
                    f"from_json() got a plan of {ranks} ranks (at most {_MOST_RANKS}) and "
                    f"{len(wants)} readers, or a bucket that is empty or has other ranks or "
                    "readers. Pass on what to_json() returned."
                )
            unsent = tuple(map(str, head.get("unsent", ())))
            return cls(target, ranks, wants, int(head["bucket_bytes"]), tuple(buckets), unsent)

    def fingerprint(self) -> str:
        """Return 32 hex digits that identify the plan.

        Publisher and readers compare these digits before they use the plan.
        """
        return self._fingerprint

    def check_reader(self, reader: int) -> None:
        """Raise PlanError if the plan has no such reader."""
        if not 0 <= reader < len(self.wants):
            raise PlanError(
                f"reader {reader} is not in the plan, which has readers 0 to "
                f"{len(self.wants) - 1}. Pass the number of a reader of the plan."
            )

    def _largest(self, indices: Iterable[int]) -> int:
        return max((self.buckets[index].bytes for index in indices), default=0)

    def _row(self, label: str, indices: Iterable[int], links: int, peak: int | None = None) -> str:
        mine = [self.buckets[index] for index in indices]
        copies, size = sum(len(b.copies) for b in mine), sum(b.bytes for b in mine)
        end = "" if peak is None else f" {peak:>16,}"
        return f"{label:>12} {links:>6} {len(mine):>8} {copies:>8} {size:>16,}{end}"

    @cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    @cached_property
    def _places(self) -> dict[tuple[str, int], tuple[int, ...]]:
        places = defaultdict[tuple[str, int], list[int]](list)
        for index, bucket in enumerate(self.buckets):
            for side in ("rank", bucket.rank), *(("reader", reader) for reader in bucket.readers):
                places[side].append(index)
        return {side: tuple(indices) for side, indices in places.items()}


def packed(target: Manifest, boxes: Iterable[tuple[str, Shard]]) -> tuple[Copy, ...]:
    """Return the `Copy`s of a bucket that stores boxes one after the other."""
    copies, end = [], 0
    for name, box in boxes:
        size = box.numel * target[name].dtype.itemsize
        copies.append(Copy(name, box, end, size))
        end += size
    return tuple(copies)


def owned_boxes(
    held: Iterable[tuple[int, Shard]], shape: tuple[int, ...]
) -> tuple[list[tuple[Shard, tuple[int, ...]]], list[Shard]]:
    """Split a tensor along every border of a held box.

    Returns the boxes with the ranks that hold each, then the boxes that no rank holds. Together
    they tile `shape`. Boxes that form a grid are returned unchanged.
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
    """Cut a box along its first dims into boxes of at most `limit` elements, in order."""
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


def _inside(target: Manifest, name: str, row: Sequence[Sequence[int]]) -> Shard:
    """Return a box that another process wrote, or raise PlanError if it is not in its tensor."""
    box = box_of(*row)
    box.within(Layout.whole(target[name].shape).shard)
    return box


def _row(box: Shard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offsets, box.sizes
