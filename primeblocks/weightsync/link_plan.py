"""Which rank sends which box to which rank, in which order: the plan as a value."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from .manifest import Manifest
from .plan import Copy

__all__ = ["DIGEST_BYTES", "Estimate", "LinkBucket", "LinkPlan", "estimate", "held_bytes"]

# XXH3-128, behind the weights of each message.
DIGEST_BYTES = 16


@dataclass(frozen=True)
class LinkBucket:
    """One message of a link: copies in this order, then a digest of `DIGEST_BYTES`.

    A copy's `offset` counts from the start of the message. Wider dtypes come first, so that each
    copy is aligned to its element. `sender` and `receiver` are ranks of the group.
    """

    sender: int
    receiver: int
    round: int
    copies: tuple[Copy, ...]

    @cached_property
    def bytes(self) -> int:
        """Bytes of weights; the message is `DIGEST_BYTES` longer."""
        return sum(copy.bytes for copy in self.copies)


@dataclass(frozen=True)
class LinkPlan:
    """How the shards of trainer ranks become the shards of engine ranks.

    The group's first ranks are the trainer's, by source; the engines' follow, by target. In a
    round a rank sends or receives one bucket at most. Ranks that go through their buckets by
    round never deadlock: both ends of the earliest unfinished bucket are done with all before.
    """

    sources: tuple[Manifest, ...]
    targets: tuple[Manifest, ...]
    bucket_bytes: int
    buckets: tuple[LinkBucket, ...]

    @property
    def world_size(self) -> int:
        """Ranks of both sides."""
        return len(self.sources) + len(self.targets)

    @property
    def rounds(self) -> int:
        """Rounds, of which a rank may sit out some."""
        return max(bucket.round for bucket in self.buckets) + 1

    @property
    def bytes_total(self) -> int:
        """Bytes of weights that are sent."""
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that any lossless plan has to move: each rank's target elements once."""
        return sum(held_bytes(target) for target in self.targets)

    @cached_property
    def bytes_by_link(self) -> dict[tuple[int, int], int]:
        """(sender, receiver) -> bytes."""
        links: dict[tuple[int, int], int] = defaultdict(int)
        for bucket in self.buckets:
            links[bucket.sender, bucket.receiver] += bucket.bytes
        return dict(links)

    @cached_property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """What each trainer rank sends, then what each engine rank receives."""
        moved = [0] * self.world_size
        for link, size in self.bytes_by_link.items():
            for rank in link:
                moved[rank] += size
        return tuple(moved)

    @property
    def max_sent_bytes(self) -> int:
        """What the busiest trainer rank sends."""
        return max(self.bytes_by_rank[: len(self.sources)])

    @property
    def max_received_bytes(self) -> int:
        """What the busiest engine rank receives."""
        return max(self.bytes_by_rank[len(self.sources) :])

    def of_rank(self, rank: int) -> tuple[LinkBucket, ...]:
        """The buckets that a rank sends or receives, by round."""
        return self._by_rank[rank]

    def peak_extra_bytes(self, rank: int) -> int:
        """Memory that a sync takes on a rank: two messages, and an engine's staging copy."""
        largest = max((bucket.bytes for bucket in self.of_rank(rank)), default=-DIGEST_BYTES)
        staged = 0
        if rank >= len(self.sources):
            staged = held_bytes(self.targets[rank - len(self.sources)])
        return staged + min(2, len(self.of_rank(rank))) * (largest + DIGEST_BYTES)

    def table(self) -> str:
        """Links, buckets, bytes and peak memory for each rank; the total against its bound."""
        lines = [f"{'rank':>5} {'side':>8} {'links':>6} {'buckets':>8} {'bytes':>16} {'peak':>16}"]
        links = [0] * self.world_size
        for sender, receiver in self.bytes_by_link:
            links[sender] += 1
            links[receiver] += 1
        for rank in range(self.world_size):
            side = "sends" if rank < len(self.sources) else "receives"
            lines.append(
                f"{rank:>5} {side:>8} {links[rank]:>6} {len(self.of_rank(rank)):>8} "
                f"{self.bytes_by_rank[rank]:>16,} {self.peak_extra_bytes(rank):>16,}"
            )
        lines.append(
            f"all: {len(self.bytes_by_link)} links, {len(self.buckets)} buckets, {self.rounds} "
            f"rounds, {self.bytes_total:,} bytes; lower bound {self.lower_bound_bytes:,} bytes"
        )
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """32 hex digits; both sides compare them before a byte is sent."""
        digest = hashlib.sha256(f"{self.bucket_bytes}".encode())
        for manifest in (*self.sources, *self.targets):
            digest.update(manifest.fingerprint().encode())
        for bucket in self.buckets:
            boxes = [(copy.name, copy.box.offsets, copy.box.sizes) for copy in bucket.copies]
            head = (bucket.sender, bucket.receiver, bucket.round)
            digest.update(repr((head, boxes)).encode())
        return digest.hexdigest()[:32]

    @cached_property
    def _by_rank(self) -> tuple[tuple[LinkBucket, ...], ...]:
        mine: list[list[LinkBucket]] = [[] for _ in range(self.world_size)]
        for bucket in self.buckets:
            mine[bucket.sender].append(bucket)
            mine[bucket.receiver].append(bucket)
        return tuple(tuple(sorted(buckets, key=lambda bucket: bucket.round)) for buckets in mine)


@dataclass(frozen=True)
class Estimate:
    """What a sync costs on paper."""

    bytes_total: int
    busiest_bytes: int
    seconds: float


def estimate(plan: LinkPlan, *, gbit_per_s: float, sent_fraction: float = 1.0) -> Estimate:
    """Bytes, and the seconds that the busiest rank needs at full line rate. Pure.

    A lower bound: no latency, no contention in the fabric, no packing, no digests.

    Args:
        gbit_per_s: what one rank sends or receives in 10^9 bits a second.
        sent_fraction: bytes sent over bytes of weights: 1 in full, less with deltas.
    """
    busiest = max(plan.bytes_by_rank) * sent_fraction
    return Estimate(
        round(plan.bytes_total * sent_fraction), round(busiest), 8 * busiest / (gbit_per_s * 1e9)
    )


def held_bytes(manifest: Manifest) -> int:
    """Bytes of a rank's boxes."""
    return sum(spec.layout.shard.numel * spec.dtype.itemsize for spec in manifest.values())
