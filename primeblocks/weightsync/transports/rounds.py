"""The order in which buckets go from rank to rank, and its cost on paper. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from ..plan import Plan

__all__ = ["Estimate", "Message", "Rounds", "estimate"]


class Message(NamedTuple):
    """A bucket on its way to one reader."""

    round: int
    bucket: int
    reader: int


@dataclass(frozen=True)
class Rounds:
    """Messages, one a bucket and reader; in a round a rank sends or receives one at most.

    Ranks that go through their messages by round never deadlock: both ends of the earliest
    unfinished message are done with all before.
    """

    by_rank: dict[int, list[Message]]
    by_reader: dict[int, list[Message]]

    @classmethod
    def of(cls, plan: Plan) -> Rounds:
        """Give each message the first round in which both its ends are free.

        That takes less than twice the rounds of the rank with most messages.
        """
        links: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, bucket in enumerate(plan.buckets):
            for reader in bucket.readers:
                links[bucket.rank, reader].append(index)
        # Links take turns, and start at another sender for each reader, so that not all want the
        # same one.
        queue = sorted(
            (turn, (rank - reader) % plan.world_size, rank, reader, index)
            for (rank, reader), indices in links.items()
            for turn, index in enumerate(indices)
        )
        busy: dict[tuple[str, int], int] = defaultdict(int)  # A bit for each round.
        by_rank: dict[int, list[Message]] = defaultdict(list)
        by_reader: dict[int, list[Message]] = defaultdict(list)
        for _, _, rank, reader, index in queue:
            free = ~(busy["rank", rank] | busy["reader", reader])
            bit = free & -free
            busy["rank", rank] |= bit
            busy["reader", reader] |= bit
            message = Message(bit.bit_length() - 1, index, reader)
            by_rank[rank].append(message)
            by_reader[reader].append(message)
        for messages in (*by_rank.values(), *by_reader.values()):
            messages.sort()
        return cls(dict(by_rank), dict(by_reader))


@dataclass(frozen=True)
class Estimate:
    """Cost of a sync from rank to rank, on paper."""

    bytes_total: int
    busiest_bytes: int
    seconds: float


def estimate(plan: Plan, *, gbit_per_s: float, sent_fraction: float = 1.0) -> Estimate:
    """Estimate the bytes, and the seconds of the busiest rank at full line rate. Pure.

    Every reader is sent its own buckets. A lower bound: no latency, no contention in the fabric,
    no packing, no digests.

    Args:
        gbit_per_s: the rate at which one rank sends or receives, in 10^9 bits a second.
        sent_fraction: bytes sent over bytes of weights: 1 in full, less with deltas.
    """
    sent = [0] * plan.world_size
    for bucket in plan.buckets:
        sent[bucket.rank] += bucket.bytes * len(bucket.readers)
    read = [plan.read_bytes(reader) for reader in range(len(plan.wants))]
    busiest = max(sent + read) * sent_fraction
    seconds = 8 * busiest / (gbit_per_s * 1e9)
    return Estimate(round(sum(sent) * sent_fraction), round(busiest), seconds)
