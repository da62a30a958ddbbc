"""The trainer's end: groups of all senders enter a `RolloutBuffer`."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass

from ....errors import CapacityError, check_counts
from ....rollout import Group
from ...buffer import RolloutBuffer
from ...ledger import check_ordinal, unpack_whole_group
from .wire import HEAD_BYTES, LOOK, Configure, GroupState, ServedSocket, zmq

__all__ = ["RolloutReceiver"]

_log = logging.getLogger(__name__)


@dataclass
class _Known:
    """A group that the receiver knows, with the connection of its newest sender."""

    sender: str
    route: bytes
    state: GroupState
    waits: asyncio.Task[None] | None = None


class RolloutReceiver:
    """Puts the groups of all senders into a buffer. Use a receiver in the buffer's event loop:

        async with RolloutReceiver(buffer, "tcp://127.0.0.1:5555") as receiver:
            groups = await buffer.take(8, version=v, timeout_s=600, on_drop=receiver.settle)
            ...  # train, save
            receiver.settle(*groups)

    Do not pass the buffer of a receiver to an `AsyncLoop`, because the loop does not know groups
    that other processes started.

    Args:
        buffer: the buffer that gets the groups. The capacity of the buffer limits the number of
            accepted groups that wait for `take`.
        address: ZeroMQ's address to bind, "tcp://10.0.0.1:5555" for instance. For port 0, the
            receiver binds a free port, and the attribute `address` contains the port.
        capacity_bytes: a limit on the payload bytes of groups that wait for room in the buffer.
            When the limit is reached, the receiver does not read messages, and ZeroMQ queues at
            most four messages per connection.
        max_group_bytes: the largest payload of a group. The receiver refuses a larger payload. If
            the payload exceeds both `max_group_bytes` and 64 MiB, ZeroMQ closes the connection.
        configure: a function that is called with the socket before the socket is bound.

    Raises:
        UsageError: the address cannot be bound, or a size is not a positive integer.
    """

    def __init__(
        self,
        buffer: RolloutBuffer,
        address: str,
        *,
        capacity_bytes: int = 4 << 30,
        max_group_bytes: int = 1 << 30,
        configure: Configure | None = None,
    ) -> None:
        check_counts(capacity_bytes=capacity_bytes, max_group_bytes=max_group_bytes)
        self._buffer = buffer
        self._capacity_bytes, self._max_group_bytes = capacity_bytes, max_group_bytes
        self._known: dict[int, _Known] = {}
        self._of: dict[str, dict[int, _Known]] = {}  # The same groups by sender.
        self._heard: dict[bytes, tuple[str, int]] = {}  # By connection, its last message.
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self.refused = 0  # The number of refused messages and groups.
        self._wire = ServedSocket(zmq.ROUTER, configure, max_bytes=max(max_group_bytes, HEAD_BYTES))
        self._wire.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._wire.open(self._wire.socket.bind, address)
        self.address = self._wire.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wire.run(self._serve())

    async def __aenter__(self) -> RolloutReceiver:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop receiving, and remove groups that wait for room. Groups in the buffer stay."""
        self._wire.close()
        for known in self._known.values():
            if known.waits is not None:
                known.waits.cancel()

    def settle(self, *groups: Group) -> None:
        """Let the senders delete their copies of groups whose training step is durable. Local.

        Pass `settle` to `take` as `on_drop=` too. Groups that no sender sent are ignored.

        Raises:
            ClosedError: the receiver has been closed, or has failed.
        """
        self._wire.check()
        routes = set()
        for group in groups:
            known = self._known.get(group.ordinal)
            if known is not None and known.state is not GroupState.SETTLED:
                known.state = GroupState.SETTLED
                routes.add(known.route)
        for route in routes:
            self._answer(route)

    async def _serve(self) -> None:
        while True:
            while self._waiting_bytes >= self._capacity_bytes:
                self._room.clear()
                await self._room.wait()
            route, *message = await self._wire.socket.recv_multipart()
            refused = None
            try:
                refused = self._read(route, message)
            # A stranger's bytes may raise any error. The receiver goes on.
            except Exception as error:
                self.refused += 1
                _log.warning("the receiver refused a message: %s: %s", type(error).__name__, error)
            self._answer(route, refused)

    def _read(self, route: bytes, message: list[bytes]) -> dict[int, str] | None:
        """Process a message. Return the group that was refused, with the reason."""
        kind, head, *rest = message
        said = json.loads(head)
        sender, number = str(said["sender"])[:64], int(said["number"])
        self._heard[route] = sender, number
        if kind == LOOK:
            self._forget(sender, route, kept={int(each) for each in said["kept"]})
            return None
        (payload,) = rest
        ordinal = check_ordinal(said["ordinal"])
        if (known := self._known.get(ordinal)) is not None:  # Perhaps sent by a restarted worker.
            self._remove(ordinal)
            known.sender, known.route = sender, route
            self._add(ordinal, known)
            return None
        try:
            if len(payload) > self._max_group_bytes:
                raise CapacityError(
                    f"the group has {len(payload):,} bytes, above "
                    f"max_group_bytes={self._max_group_bytes:,}. Raise max_group_bytes."
                )
            group = unpack_whole_group(payload, ordinal)
        except Exception as error:  # Forged bytes may raise any error.
            self.refused += 1
            return {ordinal: f"{type(error).__name__}: {error}"[:500]}
        known = _Known(sender, route, GroupState.ARRIVED)
        self._add(ordinal, known)
        size = len(payload)
        self._waiting_bytes += size
        known.waits = asyncio.ensure_future(self._put(known, group))
        # A callback, because the task may be cancelled before it begins.
        known.waits.add_done_callback(lambda _: self._no_longer_waits(size))
        return None

    async def _put(self, known: _Known, group: Group) -> None:
        try:
            # No deadline: after the sender's deadline, `_forget` cancels this.
            await self._buffer.put(group, timeout_s=float("inf"))
        except CapacityError as error:
            self._remove(group.ordinal)
            self._answer(known.route, {group.ordinal: str(error)})
            return
        known.waits = None
        if known.state is GroupState.ARRIVED:  # `take` may have dropped and settled it.
            known.state = GroupState.ACCEPTED
            self._answer(known.route)

    def _no_longer_waits(self, size: int) -> None:
        self._waiting_bytes -= size
        self._room.set()

    def _forget(self, sender: str, route: bytes, kept: set[int]) -> None:
        for ordinal, known in list(self._of.get(sender, {}).items()):
            known.route = route
            if ordinal in kept or known.state is GroupState.ACCEPTED:
                continue
            if known.waits is not None:
                known.waits.cancel()
            self._remove(ordinal)

    def _add(self, ordinal: int, known: _Known) -> None:
        self._known[ordinal] = known
        self._of.setdefault(known.sender, {})[ordinal] = known

    def _remove(self, ordinal: int) -> None:
        known = self._known.pop(ordinal)
        del self._of[known.sender][ordinal]
        if not self._of[known.sender]:
            del self._of[known.sender]

    def _answer(self, route: bytes, refused: dict[int, str] | None = None) -> None:
        sender, number = self._heard.get(route, ("", 0))
        answer = {
            "number": number,
            "states": {at: known.state.value for at, known in self._of.get(sender, {}).items()},
            "max_group_bytes": self._max_group_bytes,
        }
        answer["refused"] = refused or {}
        self._wire.send([route, json.dumps(answer).encode()])  # A sender that misses it asks again.
