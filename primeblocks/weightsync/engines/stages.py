"""Stages of a change that all ranks make, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ...errors import DeadlineError, EngineError, TransferError
from ..agree import Agreement

__all__ = ["Do", "Stage", "Stages"]

_MESSAGE_BYTES = 1024
_SHOWN = 150


@dataclass(frozen=True)
class Stage:
    """One stage of a turn, and the bytes that were in use when it was done."""

    name: str
    seconds: float
    bytes: int


Do = Callable[[float], Any]
"""Takes the seconds that are left."""


class Stages:
    """Stages that are done in step with other ranks, and undone backwards when the `with` fails.

    Half of `timeout_s` is for doing, the rest for undoing. An undo that fails calls `tear`.
    """

    def __init__(
        self,
        agreement: Agreement,
        memory: Callable[[], int],
        tear: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._agreement, self._memory, self._tear = agreement, memory, tear
        self._start, self._timeout_s = time.monotonic(), timeout_s
        self._in_step = True
        self.bytes_before = memory()
        self.stages: list[Stage] = []
        # As long on every rank, so that ranks undo in step too.
        self.undo: list[Do | None] = []

    def stage(self, name: str, do: Do, *, undo: Do | None = None) -> Any:
        """Do it here, then hear the outcome elsewhere. `undo` is called only if it was done."""
        start = time.monotonic()
        error: BaseException | None = None
        result = None
        try:
            result = do(self._left_s(name))
        except Exception as met:  # Whatever it is, the other ranks have to know.
            error = met
        self.undo.append(undo if error is None else None)
        others = self._tell(error, at=0.75)
        if error is not None:
            raise error
        if others:
            raise TransferError(f"{name!r} failed on {others}. All ranks went back.")
        self.stages.append(Stage(name, time.monotonic() - start, self._memory()))
        return result

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if not isinstance(error, Exception):
            self._in_step = False  # Interrupted: the others were not told.
        for undo in reversed(self.undo):
            met: Exception | None = None
            try:
                if undo is not None:
                    undo(max(0.0, self._by(1.0) - time.monotonic()))
            except Exception as second:  # Told to the other ranks, then raised.
                met = second
            others = self._tell(met, at=1.0)
            if met is not None or others:
                self._tear()
                raise EngineError(
                    f"{_text(error)} Going back failed too: {others or _text(met)} Trainer and "
                    "engine may both be away: restart the engine."
                ) from error

    def _by(self, part: float) -> float:
        return self._start + part * self._timeout_s

    def _left_s(self, name: str) -> float:
        left_s = self._by(0.5) - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(
                f"{name!r} was not begun: half of {self._timeout_s} s was over after "
                f"{[stage.name for stage in self.stages]}."
            )
        return left_s

    def _tell(self, error: BaseException | None, *, at: float) -> str:
        """Return the failures of other ranks; nothing once the ranks are out of step."""
        if not self._in_step:
            return ""
        message = {"error": "" if error is None else _text(error)}
        try:
            said = self._agreement.exchange(
                message, size_bytes=_MESSAGE_BYTES, deadline=self._by(at)
            )
        except TransferError:
            self._in_step = False
            if error is None and at < 1.0:
                raise
            return ""
        met = [(rank, reply["error"]) for rank, reply in enumerate(said) if reply["error"]]
        return "; ".join(f"rank {r}: {text}" for r, text in met if r != self._agreement.rank)


def _text(error: BaseException | None) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.encode("ascii", "replace").decode()[:_SHOWN].rstrip(".") + "."
