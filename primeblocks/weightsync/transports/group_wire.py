"""The messages of one rank of a process group, two at a time, and the estimated cost of a sync."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import TransferError
from ..held import Boxes, Held, in_time, left_s, packed_views
from ..marker import Marker
from ..outgoing import Shipment
from ..plan import Plan
from .board import Board

__all__ = [
    "Arrived",
    "Estimate",
    "Link",
    "Message",
    "Rounds",
    "estimate",
    "join",
    "receive_buckets",
    "send_buckets",
]

_IN_FLIGHT = 2


class Message(NamedTuple):
    """A bucket on its way to one reader."""

    round: int
    bucket: int
    reader: int


@dataclass(frozen=True)
class Rounds:
    """The rounds of the messages of a sync. There is one message per bucket and reader.

    In a round, a rank sends or receives at most one message. Ranks that follow the rounds never
    deadlock, because both ends of the earliest unfinished message have finished all earlier ones.
    """

    by_rank: dict[int, list[Message]]
    by_reader: dict[int, list[Message]]

    @classmethod
    def of(cls, plan: Plan) -> Rounds:
        """Give each message the first round in which both its ends are free.

        This takes fewer rounds than twice the messages of the busiest rank.
        """
        links: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, bucket in enumerate(plan.buckets):
            for reader in bucket.readers:
                links[bucket.rank, reader].append(index)
        # Pairs of a sender and a reader take turns. Each reader starts at another sender, so that
        # not all readers wait for the same sender.
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


class Link(NamedTuple):
    """This rank's end of a group, of gloo or NCCL. The first `trainers` ranks send."""

    group: Any
    trainers: int
    device: torch.device


def join(
    store: dist.Store,
    *,
    rank: int,
    trainers: int,
    readers: int,
    device: torch.device,
    deadline: float,
) -> Link:
    """Make a group of all ranks that join in this store. Collective.

    torch.distributed does not know the group, so a process that has other groups may join. Do not
    use this store object in other calls meanwhile, because it does one call at a time.
    """
    patience = timedelta(seconds=left_s(deadline, least_s=0.001))
    size = trainers + readers
    links: list[Link] = []

    def connect() -> None:
        group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            group = dist.ProcessGroupGloo(store, rank, size, patience)
        links.append(Link(group, trainers, device))

    try:
        Board(store, "").call(connect, deadline=deadline)
    except TransferError as error:
        raise TransferError(
            f"not all {size} ranks came together in time: {error}. Start all of them."
        ) from error
    return links[0]


class Arrived:
    """A version in this reader's memory. A full version is in `boxes`."""

    marker: Marker

    def __init__(
        self, plan: Plan, boxes: Boxes | None, *, settle: Callable[[str, float], None]
    ) -> None:
        self._plan, self._boxes, self._settle = plan, boxes, settle
        self._payloads: dict[int, memoryview] = {}

    def take(self, index: int, message: Tensor) -> None:
        if self._boxes is None:
            self._payloads[index] = memoryview(message.cpu().numpy().tobytes())
            return
        pieces = packed_views(self._plan, index, message)
        for view, piece in zip(self._boxes.views(index), pieces, strict=True):
            view.copy_(piece)

    def whole(self) -> Held:
        assert self._boxes is not None, "a delta is not whole"
        return self._boxes

    def payload(self, index: int) -> memoryview:
        return self._payloads[index]

    def settle(self, error: str, *, deadline: float) -> None:
        self._settle(error, deadline)


def send_buckets(
    link: Link, outgoing: Shipment, messages: Sequence[Message], *, deadline: float
) -> None:
    """Send each bucket to each of its readers.

    Cost: two buffers, each of the size of the largest message.

    Raises:
        RuntimeError: the backend's error after a reader died or the deadline passed.
    """
    buckets = outgoing.plan.buckets
    size = max((buckets[message.bucket].bytes for message in messages), default=0)
    buffers = _buffers(link, messages, size)
    works: list[dist.Work | None] = [None] * _IN_FLIGHT
    for number, message in enumerate(messages):
        turn = number % _IN_FLIGHT
        _wait(works[turn], deadline)
        filled = [_fill(outgoing, message.bucket, buffers[turn])]
        to = link.trainers + message.reader
        works[turn] = link.group.send(filled, to, 0)
    for work in works:
        _wait(work, deadline)


def receive_buckets(
    link: Link,
    plan: Plan,
    sizes: Mapping[int, int],
    messages: Sequence[Message],
    take: Callable[[int, Tensor], object],
    *,
    deadline: float,
) -> None:
    """Receive each bucket and pass its bytes to `take`, which must copy them.

    Cost: two buffers, each of the size of the largest message. Raises the errors of `send_buckets`.
    """
    size = max((sizes[message.bucket] for message in messages), default=0)
    buffers = _buffers(link, messages, size)
    works: list[dist.Work | None] = [None] * _IN_FLIGHT

    def post(number: int) -> None:
        index = messages[number].bucket
        buffer, sender = buffers[number % _IN_FLIGHT][: sizes[index]], plan.buckets[index].rank
        works[number % _IN_FLIGHT] = link.group.recv([buffer], sender, 0)

    for number in range(len(buffers)):
        post(number)
    for number, message in enumerate(messages):
        _wait(works[number % _IN_FLIGHT], deadline)
        take(message.bucket, buffers[number % _IN_FLIGHT][: sizes[message.bucket]])
        if number + _IN_FLIGHT < len(messages):
            post(number + _IN_FLIGHT)


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a sync over a process group.

    Attributes:
        bytes_total: the bytes that all trainer ranks send.
        busiest_bytes: the bytes that the busiest rank sends or receives.
        seconds: the time of the busiest rank.
    """

    bytes_total: int
    busiest_bytes: int
    seconds: float


def estimate(plan: Plan, *, gbit_per_s: float, sent_fraction: float = 1.0) -> Estimate:
    """Estimate the bytes and the time of a sync over a process group. Pure.

    A bucket is sent once for each of its readers. The estimated time is the time of the busiest
    rank at full line rate. The estimate is a lower bound, without latency, contention in the
    fabric, packing or digests.

    Args:
        gbit_per_s: the rate at which one rank sends or receives, in 10^9 bits per second.
        sent_fraction: the bytes sent per byte of weights: 1 for full versions, and less for deltas.
    """
    sent = [0] * plan.world_size
    for bucket in plan.buckets:
        sent[bucket.rank] += bucket.bytes * len(bucket.readers)
    read = [plan.read_bytes(reader) for reader in range(len(plan.wants))]
    busiest = max(sent + read) * sent_fraction
    seconds = 8 * busiest / (gbit_per_s * 1e9)
    return Estimate(round(sum(sent) * sent_fraction), round(busiest), seconds)


def _buffers(link: Link, messages: Sequence[Message], size_bytes: int) -> list[Tensor]:
    count = min(_IN_FLIGHT, len(messages))
    return [torch.empty(size_bytes, dtype=torch.uint8, device=link.device) for _ in range(count)]


def _fill(outgoing: Shipment, index: int, buffer: Tensor) -> Tensor:
    if outgoing.base is not None:
        payload = torch.frombuffer(outgoing.payload(index), dtype=torch.uint8)
        filled = buffer[: len(payload)]
        filled.copy_(payload)
        return filled
    filled = buffer[: outgoing.plan.buckets[index].bytes]
    outgoing.fill_all([(index, packed_views(outgoing.plan, index, filled))])
    return filled


def _wait(work: dist.Work | None, deadline: float) -> None:
    """Wait until an earlier message does not need its buffer any more."""
    if work is None:
        return
    in_time(deadline, "a message came too late")
    # Not 0, because then a work waits without a limit.
    work.wait(timedelta(seconds=left_s(deadline, least_s=0.001)))
