"""The messages of both ends of a connection, and a socket with the tasks that serve it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from ....errors import ClosedError, UsageError, needs

with needs("zmq", extra="zmq"):
    import zmq
    import zmq.asyncio

__all__ = [
    "GROUP",
    "HEAD_BYTES",
    "LOOK",
    "Configure",
    "GroupState",
    "ServedSocket",
    "zmq",
]

Configure = Callable[["zmq.Socket[Any]"], None]

GROUP, LOOK = b"group", b"look"
HEAD_BYTES = 64 << 20  # The longest list of ordinals or states: of some two million groups.
_QUEUED = 4  # Messages per connection that ZeroMQ may queue, each with at most one group.
_log = logging.getLogger(__name__)


class GroupState(Enum):
    """The states of a group at the receiver."""

    ARRIVED = "arrived"
    ACCEPTED = "accepted"
    SETTLED = "settled"


class ServedSocket:
    """A socket with the tasks that serve it. If a task fails, all calls raise `ClosedError`."""

    def __init__(self, kind: int, configure: Configure | None, *, max_bytes: int) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, _QUEUED)
        self.socket.setsockopt(zmq.SNDHWM, _QUEUED)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        if configure is not None:
            configure(self.socket)
        self.ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, call: Callable[[str], Any], address: str) -> None:
        try:
            call(address)
        except (zmq.ZMQError, TypeError) as error:
            self._context.destroy(linger=0)
            raise UsageError(
                f"the address {address!r} cannot be opened: {error}. Choose another address."
            ) from error

    def run(self, *bodies: Coroutine[Any, Any, None]) -> None:
        self._tasks = [asyncio.ensure_future(each) for each in bodies]
        for task in self._tasks:
            task.add_done_callback(self._is_done)

    def send(self, frames: list[bytes]) -> bool:
        """Send a message if that is possible without waiting. Local."""
        done: Any = self.socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        error = done.exception()  # With NOBLOCK it is done at once.
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
            return False
        raise error

    def check(self) -> None:
        if self.ended.done():
            raise ClosedError(str(self.ended.result())) from self.ended.result()

    def close(self) -> None:
        self._end(ClosedError("this sender or receiver was closed. Create another one."))
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    def _is_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the connection of a sender or receiver failed", exc_info=error)
            self._end(
                ClosedError(
                    f"the connection of this sender or receiver failed: {type(error).__name__}: "
                    f"{error}. Create another one, a receiver with a new buffer."
                )
            )

    def _end(self, error: ClosedError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)
