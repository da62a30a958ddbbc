"""An object in another process: its methods are called over a pipe, one at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

__all__ = ["Worker"]

TIMEOUT_S = 300.0


class Worker:
    """`make(*args)` in a process of its own, where it stays until close().

    Args:
        make: importable; the object may have `close()`.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """The answer of `method(*args)`.

        Raises:
            RuntimeError: it raised, or gave no answer in time.
            EOFError: the process died.
        """
        self._pipe.send((method, args))
        if not self._pipe.poll(TIMEOUT_S):
            raise RuntimeError(f"no answer within {TIMEOUT_S} s")
        failed, answer = self._pipe.recv()
        if failed:
            raise RuntimeError(answer)
        return answer

    def kill(self) -> None:
        """End the process as a crash would."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """End the process, its object first."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    thing = make(*args)
    try:
        while True:
            method, operands = pipe.recv()
            try:
                answer = False, getattr(thing, method)(*operands)
            except Exception as error:  # Told to the caller, who raises it.
                answer = True, f"{method}: {type(error).__name__}: {error}"
            pipe.send(answer)
    except EOFError:
        pass  # The caller closed its end.
    finally:
        if hasattr(thing, "close"):
            thing.close()
