"""The worker's end, which sends groups and keeps each group until the group is settled."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ....clock import Clock, MonotonicClock, within
from ....errors import CapacityError, UnsupportedError, UsageError, check_counts
from ....rollout import Group
from ...ledger import check_ordinal, pack_whole_group
from .wire import GROUP, HEAD_BYTES, LOOK, Configure, GroupState, ServedSocket, zmq

__all__ = ["RolloutSender"]


@dataclass(eq=False)
class _Kept:
    """A group that is not settled."""

    payload: bytes
    accepted: asyncio.Future[None]
    sent: int | None = None  # The number of the last message that contained it.


class RolloutSender:
    """Sends finished groups to a `RolloutReceiver`, and keeps a copy of each unsettled group.

    Use a sender from one event loop. Give every group an ordinal that no other group has.

    Args:
        address: the address of the receiver, such as "tcp://10.0.0.1:5555".
        capacity_bytes: the largest total payload of unsettled groups, in bytes. `put` waits until
            the unsettled groups and the new group together fit into `capacity_bytes`.
        retry_s: the longest time between two requests to the receiver, in seconds. A lost group is
            sent again after about `retry_s` seconds.
        clock: the clock that measures the deadlines.
        configure: a function that is called with the socket before the socket connects.

    Raises:
        UsageError: the address is malformed, or a size or `retry_s` is not positive.
    """

    def __init__(
        self,
        address: str,
        *,
        capacity_bytes: int = 4 << 30,
        retry_s: float = 1.0,
        clock: Clock | None = None,
        configure: Configure | None = None,
    ) -> None:
        check_counts(capacity_bytes=capacity_bytes)
        if not retry_s > 0:
            raise UsageError(f"retry_s must be above 0 s; got {retry_s!r}")
        self._address, self._capacity_bytes, self._retry_s = address, capacity_bytes, retry_s
        self._clock = MonotonicClock() if clock is None else clock
        self._name, self._number = uuid.uuid4().hex, 0
        self._kept: dict[int, _Kept] = {}
        self._lost: list[str] = []  # Why a later receiver refused accepted groups.
        self._answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._changed, self._wake = asyncio.Event(), asyncio.Event()
        self._wire = ServedSocket(zmq.DEALER, configure, max_bytes=HEAD_BYTES)
        self._wire.socket.setsockopt(zmq.IMMEDIATE, 1)  # Queue nothing without a connection.
        self._wire.open(self._wire.socket.connect, address)
        self._wire.run(self._ask(), self._hear())

    async def __aenter__(self) -> RolloutSender:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop sending, and delete all copies. Await `settled` first, so that no group is lost."""
        self._wire.close()

    @property
    def kept(self) -> tuple[int, ...]:
        """The ordinals of the groups that are not settled."""
        return tuple(self._kept)

    async def put(self, group: Group, *, timeout_s: float) -> None:
        """Send a group, and return when the group is in the receiver's buffer.

        Raises:
            DeadlineError: no receiver answered, the receiver's buffer was full, or unsettled groups
                fill `capacity_bytes`. The sender withdraws the group. If the receiver accepted the
                group at the last moment, the group is trained on. A group that you put again may
                therefore be trained on twice.
            CapacityError: the group exceeds `capacity_bytes` or the receiver's `max_group_bytes`.
            UnsupportedError: the receiver refused the group, for example because the group exceeds
                the buffer's `capacity_bytes`. UnsupportedError is also raised if `codec.pack`
                cannot pack the group.
            UsageError: an unsettled group has the same ordinal.
            ClosedError: the sender was closed, or has failed.
        """
        ordinal, payload = check_ordinal(group.ordinal), pack_whole_group(group)
        if len(payload) > self._capacity_bytes:
            raise CapacityError(
                f"the group of ordinal {ordinal} has {len(payload):,} bytes, above "
                f"capacity_bytes={self._capacity_bytes:,}. Raise capacity_bytes."
            )
        await self._within(self._deliver(ordinal, payload), timeout_s, f"put of group {ordinal}")

    async def settled(self, *, timeout_s: float) -> None:
        """Wait until every group is settled.

        Raises:
            DeadlineError: some groups are not settled, and the sender keeps them.
            UnsupportedError: a restarted receiver refused groups that an earlier receiver accepted.
            ClosedError: the sender was closed, or has failed.
        """
        await self._within(self._until(lambda: not self._kept), timeout_s, "settling")
        if self._lost:
            raise UnsupportedError("; ".join(self._lost))

    async def _within(self, wait: Coroutine[Any, Any, None], timeout_s: float, what: str) -> None:
        what, ended = f"{what} at {self._address}", self._wire.ended
        await within(wait, timeout_s=timeout_s, clock=self._clock, what=what, unless=ended)

    async def _deliver(self, ordinal: int, payload: bytes) -> None:
        most = await asyncio.shield(self._answered)
        if len(payload) > most:
            raise CapacityError(
                f"the group of ordinal {ordinal} has {len(payload):,} bytes, above the receiver's "
                f"max_group_bytes={most:,}. Raise max_group_bytes of the receiver."
            )

        def is_room() -> bool:
            used = sum(len(each.payload) for each in self._kept.values())
            return used + len(payload) <= self._capacity_bytes

        await self._until(is_room)
        if ordinal in self._kept:
            raise UsageError(
                f"a group of ordinal {ordinal} is not settled yet. Give each group its own ordinal."
            )
        kept = _Kept(payload, asyncio.get_running_loop().create_future())
        self._kept[ordinal] = kept
        self._wake.set()
        try:
            await kept.accepted
        except BaseException:
            if self._kept.get(ordinal) is kept:
                self._drop(ordinal)
            raise

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    def _drop(self, ordinal: int) -> None:
        del self._kept[ordinal]
        self._changed.set()

    async def _ask(self) -> None:
        """Send new groups, and name all kept groups, at least every `retry_s`."""
        while True:
            self._wake.clear()
            for ordinal, kept in self._kept.items():
                if kept.sent is None and self._send(GROUP, {"ordinal": ordinal}, kept.payload):
                    kept.sent = self._number
            self._send(LOOK, {"kept": [*self._kept]})
            try:
                await asyncio.wait_for(self._wake.wait(), self._retry_s)
            except TimeoutError:
                continue

    def _send(self, kind: bytes, said: dict[str, Any], *rest: bytes) -> bool:
        head = said | {"sender": self._name, "number": self._number + 1}
        is_sent = self._wire.send([kind, json.dumps(head).encode(), *rest])
        self._number += is_sent
        return is_sent

    async def _hear(self) -> None:
        while True:
            (message,) = await self._wire.socket.recv_multipart()
            said = json.loads(message)
            if not self._answered.done():
                self._answered.set_result(said["max_group_bytes"])
            for ordinal, kept in list(self._kept.items()):
                self._learn(ordinal, kept, said)
            if any(kept.sent is None for kept in self._kept.values()):
                self._wake.set()  # The receiver has read, so the full queue has room.

    def _learn(self, ordinal: int, kept: _Kept, said: dict[str, Any]) -> None:
        state, reason = said["states"].get(str(ordinal)), said["refused"].get(str(ordinal))
        if reason is not None:
            why = f"the receiver refused the group of ordinal {ordinal}: {reason}"
            if kept.accepted.done():
                self._lost.append(why)
            else:
                kept.accepted.set_exception(UnsupportedError(why))
            self._drop(ordinal)
        elif state is None and kept.sent is not None and kept.sent <= said["number"]:
            kept.sent = None  # It was lost, or the receiver was restarted.
            self._wake.set()
        elif state in {GroupState.ACCEPTED.value, GroupState.SETTLED.value}:
            if not kept.accepted.done():
                kept.accepted.set_result(None)
            if state == GroupState.SETTLED.value:
                self._drop(ordinal)
