"""One thread for calls that would block the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["WorkerThread"]

T = TypeVar("T")


class WorkerThread:
    """Run blocking calls one after the other, always in the same thread.

    The same thread, because the current CUDA device, its streams and OpenMP's
    teams belong to a thread. A daemon, because a call that hangs must end in an
    error here and not keep the process alive; `asyncio.to_thread` would.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Await `function(*args, **kwargs)`; a cancelled call that has begun goes on, unseen."""
        future: Future[T] = Future()
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after the calls already made; does not wait for them."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
