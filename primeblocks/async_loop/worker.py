"""Checks of the user's functions, and a thread for functions that block the event loop."""

import asyncio
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from ..errors import UsageError, shown

__all__ = ["WorkerThread", "check_call", "is_async"]

T = TypeVar("T")


class WorkerThread:
    """A thread that runs blocking calls one after the other.

    It is one thread, because the current CUDA device, its streams and OpenMP's teams belong to a
    thread. Its device is that of the thread that makes it. It is a daemon: a call that hangs does
    not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
        self._device = cuda.current_device() if cuda and cuda.is_initialized() else None
        self._calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._last: Future | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Await `function(*args, **kwargs)`. A started call continues even if it is cancelled."""
        future: Future[T] = Future()
        self._last = future
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return await asyncio.wrap_future(future)

    async def join(self, timeout_s: float) -> None:
        """End the thread. Wait until the calls made so far have ended, at most for `timeout_s`."""
        self.close()
        if self._last is not None and not self._last.done():
            last = asyncio.gather(asyncio.wrap_future(self._last), return_exceptions=True)
            await asyncio.wait({last}, timeout=timeout_s)

    def close(self) -> None:
        """End the thread after the calls made so far, without waiting for them."""
        self._calls.put(None)

    def _serve(self) -> None:
        if self._device is not None:
            sys.modules["torch"].cuda.set_device(self._device)
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except StopIteration as error:  # A future of asyncio refuses StopIteration.
                    text = f"a function in the thread {self._thread.name!r} raised {error!r}. "
                    raised = RuntimeError(f"{text}Catch this error in the function.")
                    raised.__cause__ = error
                    future.set_exception(raised)
                    del raised
                except BaseException as error:
                    future.set_exception(error)
            del item, future, call  # Otherwise these names hold a batch until the next call.


def is_async(function: Callable[..., Any]) -> bool:
    """Say whether a function, method or callable object returns a coroutine when called. Pure.

    For a decorated function the answer is about the decorator's function.
    """
    while isinstance(function, functools.partial):
        function = function.func
    call = inspect.getattr_static(type(function), "__call__", None)  # Of a callable object.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def check_call(
    name: str,
    function: Any,
    *given: str,
    kind: Literal["async", "plain", "either"] = "either",
    **named: Any,
) -> None:
    """Check that a function can be called with these arguments. Pure.

    Raises:
        UsageError: it is not callable or not of this kind, or its signature does not fit.
    """
    if not callable(function):
        raise UsageError(f"{name}= must be callable; got {shown(function)}. Pass a function.")
    # A plain function may return the coroutine of a function that it decorates.
    decorated = kind == "async" and is_async(inspect.unwrap(function))
    if kind != "either" and (decorated or is_async(function)) != (kind == "async"):
        raise UsageError(
            f"{name}= must be {kind}; got {shown(function)}. Define it with "
            f"{'async def' if kind == 'async' else 'def'}."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some built-in functions have none.
        return
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        called = ", ".join([*given, *(f"{key}=" for key in named)])
        raise UsageError(
            f"{name} will be called as {name}({called}), but takes {signature}: {error}. Change "
            "its parameters."
        ) from None
