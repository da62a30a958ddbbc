"""Functions of the user: what they take, and one thread for those that block the event loop."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from ..errors import UsageError, shown

__all__ = ["WorkerThread", "check_call", "is_async"]

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


def is_async(function: Callable[..., Any]) -> bool:
    """Say whether a call returns a coroutine: of a function, a method or an object. Pure.

    Of a decorated one the decorator's word counts, not what it decorates.
    """
    while isinstance(function, functools.partial):
        function = function.func
    call = inspect.getattr_static(type(function), "__call__", None)  # Of an object.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def check_call(
    name: str,
    function: Any,
    *given: str,
    kind: Literal["async", "plain", "either"] = "either",
    **named: Any,
) -> None:
    """Refuse what cannot be called with these arguments. Pure.

    Raises:
        UsageError: it is not callable, not of this kind, or its signature takes other arguments.
    """
    if not callable(function):
        raise UsageError(f"{name}= must be callable; got {shown(function)}. Pass a function.")
    # A plain function may hand on the coroutine of one that it decorates.
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
            f"{name} will be called as {name}({called}), and takes {signature}: {error}. Change "
            "its parameters."
        ) from None
