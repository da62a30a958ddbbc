"""Faults of clocks, transports and files, under the control of a test."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from primeblocks.errors import UsageError

__all__ = ["FaultyTransport", "ManualClock", "flip_byte", "truncate"]

Call = Callable[[], Any]
Fault = BaseException | Callable[[Call], Any] | None


class FaultyTransport:
    """A wrapper that forwards method calls to an object, but injects the faults of a script.

    Use this class for transports, stores, engines, or any other object with methods. For example:

        faulty = FaultyTransport(inner, {"send": [None, ConnectionError("cut"), lambda call: None]})

    This wrapper forwards the first `send`, raises an error in the second call, does not execute the
    third call, and forwards later calls.

    Args:
        inner: the wrapped object.
        script: for each method name, a list with one entry per call. An entry None forwards the
            call. An entry that is an exception is raised instead of the call. An entry that is a
            function is called instead of the method, and returns the result. The argument of this
            function is a function without parameters that makes the original call.

    Raises:
        UsageError: `script` contains a method that `inner` does not have.
    """

    def __init__(self, inner: object, script: Mapping[str, Sequence[Fault]]) -> None:
        unknown = [name for name in script if not callable(getattr(inner, name, None))]
        if unknown:
            raise UsageError(f"{type(inner).__name__} has no method {', '.join(unknown)}")
        self._inner = inner
        self._script = {name: iter(faults) for name, faults in script.items()}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._wrap(name, value) if callable(value) else value

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            fault = next(self._script.get(name, iter(())), None)
            if fault is None:
                return method(*args, **kwargs)
            if isinstance(fault, BaseException):
                raise fault
            return fault(lambda: method(*args, **kwargs))

        return call


class ManualClock:
    """A clock whose time changes only in `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the time in seconds, which never decreases."""
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has moved the clock by `seconds`."""
        if seconds > 0:
            woken = asyncio.get_running_loop().create_future()
            self._sleepers.append((self._now_s + seconds, woken))
            await woken

    def advance(self, seconds: float) -> None:
        """Move the clock by `seconds`, and wake sleepers that are due, earliest first. Local."""
        if seconds < 0:
            raise UsageError(f"time cannot go back; got advance({seconds})")
        self._now_s += seconds
        due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self._now_s]
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > self._now_s]
        for _, woken in sorted(due, key=lambda sleeper: sleeper[0]):
            if not woken.done():
                woken.set_result(None)


def flip_byte(path: str | Path, offset: int) -> None:
    """Invert one byte of a file. A negative offset counts from the end of the file.

    Raises:
        UsageError: the offset is outside of the file.
    """
    content = bytearray(Path(path).read_bytes())
    if not -len(content) <= offset < len(content):
        raise UsageError(
            f"{path} has {len(content)} bytes, so offset {offset} is outside of the file"
        )
    content[offset] ^= 0xFF
    Path(path).write_bytes(content)


def truncate(path: str | Path, *, size_bytes: int) -> None:
    """Cut a file to `size_bytes`, to simulate a crash in the middle of a write.

    Raises:
        UsageError: `size_bytes` is negative, or is not smaller than the file.
    """
    content = Path(path).read_bytes()
    if not 0 <= size_bytes < len(content):
        raise UsageError(f"{path} has {len(content)} bytes, so it cannot be cut to {size_bytes}")
    Path(path).write_bytes(content[:size_bytes])
