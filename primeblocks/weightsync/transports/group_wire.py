"""Messages of one rank of a process group, two at a time, in the order of their rounds.

A group is one that torch.distributed knows, or one that ranks make over a store, which it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DeadlineError, TransferError
from ..held import Boxes, Held, packed_views
from ..marker import Marker
from ..plan import Plan
from .board import Board
from .rounds import Message
from .transport import Outgoing

__all__ = ["Arrived", "Group", "join", "receive_buckets", "send_buckets"]

_IN_FLIGHT = 2

Group = dist.ProcessGroup | dist.ProcessGroupGloo


def join(store: dist.Store, name: str, *, rank: int, size: int, deadline: float) -> Group:
    """Make a gloo group with all who join one of this name; collective.

    It is none of torch.distributed's own: a process that has other groups may join.

    Raises:
        TransferError: not all came in time.
    """
    # A store does one thing at a time, and this one waits.
    own: dist.Store = store.clone()  # type: ignore[attr-defined]  # Its stub lacks it.
    patience = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    groups: list[Group] = []

    def connect() -> None:
        groups.append(dist.ProcessGroupGloo(dist.PrefixStore(name, own), rank, size, patience))

    try:
        Board(own, name).wait_for(connect, deadline=deadline)
    except TransferError as error:
        raise TransferError(f"not all {size} ranks came together in time: {error}") from error
    return groups[0]


class Arrived:
    """A version in this reader's memory; other readers may not have all of it yet."""

    marker: Marker

    def __init__(
        self,
        plan: Plan,
        reader: int,
        *,
        full: bool,
        keep: bool,
        device: torch.device,
        settle: Callable[[str, float], None],
    ) -> None:
        self._plan, self._settle = plan, settle
        self._boxes = Boxes(plan, reader, stays=keep, device=device) if full else None
        self._payloads: dict[int, memoryview] = {}

    def take(self, index: int, message: Tensor) -> None:
        """Copy a message out of its buffer."""
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
    outgoing: Outgoing,
    messages: Sequence[Message],
    *,
    to: Callable[[int], int],
    group: Group,
    device: torch.device,
    deadline: float,
) -> None:
    """Send each bucket to each reader. Two buffers, each the size of the largest message.

    Raises:
        RuntimeError: the backend's error when a reader died or the deadline passed.
        DeadlineError: the deadline passed.
    """
    buckets = outgoing.plan.buckets
    size = max((buckets[message.bucket].bytes for message in messages), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in messages[:_IN_FLIGHT]]
    works: list[dist.Work | None] = [None] * _IN_FLIGHT
    for place, message in enumerate(messages):
        turn = place % _IN_FLIGHT
        _wait(works[turn], deadline)
        filled = _fill(outgoing, message.bucket, buffers[turn])
        works[turn] = group.send([filled], to(message.reader), 0)  # type: ignore[union-attr]
    for work in works:
        _wait(work, deadline)


def receive_buckets(
    sizes: Mapping[int, int],
    messages: Sequence[Message],
    take: Callable[[int, Tensor], object],
    *,
    sender: Callable[[int], int],
    group: Group,
    device: torch.device,
    deadline: float,
) -> None:
    """Receive each bucket and hand its bytes to `take`, which copies them.

    Cost: two buffers, each the size of the largest message. Raises as `send_buckets`.
    """
    size = max((sizes[message.bucket] for message in messages), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in messages[:_IN_FLIGHT]]
    works: list[dist.Work | None] = [None] * _IN_FLIGHT

    def post(place: int) -> None:
        index = messages[place].bucket
        buffer = buffers[place % _IN_FLIGHT][: sizes[index]]
        works[place % _IN_FLIGHT] = group.recv([buffer], sender(index), 0)  # type: ignore[union-attr]

    for place in range(len(buffers)):
        post(place)
    for place, message in enumerate(messages):
        _wait(works[place % _IN_FLIGHT], deadline)
        take(message.bucket, buffers[place % _IN_FLIGHT][: sizes[message.bucket]])
        if place + _IN_FLIGHT < len(messages):
            post(place + _IN_FLIGHT)


def _fill(outgoing: Outgoing, index: int, buffer: Tensor) -> Tensor:
    if outgoing.base is not None:
        # Bytes of a delta may not be written to, which frombuffer asks for.
        payload = torch.frombuffer(bytearray(outgoing.payload(index)), dtype=torch.uint8)
        filled = buffer[: len(payload)]
        filled.copy_(payload)
        return filled
    filled = buffer[: outgoing.plan.buckets[index].bytes]
    outgoing.fill(index, packed_views(outgoing.plan, index, filled))
    return filled


def _wait(work: dist.Work | None, deadline: float) -> None:
    """Wait until the buffer of an earlier message is done with."""
    if work is None:
        return
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineError("a message came too late")
    # Not 0: a work's wait takes that for "for ever".
    work.wait(timedelta(seconds=max(0.001, remaining_s)))
