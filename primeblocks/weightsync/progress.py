"""The progress of a call: a caller's function gets the bytes that are done, and the total."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Counted", "Progress"]

Progress = Callable[[int, int], object]


class Counted:
    """Counts bytes, and calls a caller's function with the count and the total.

    An error of the function ends the call. In the last stage, such as a load, `error` keeps the
    error until the stage has ended, and the function is not called again.

    Args:
        last_bytes: the bytes of the last stage.
    """

    def __init__(self, progress: Progress | None, *, last_bytes: int = 0) -> None:
        self.error: Exception | None = None
        self._progress, self._last_bytes, self._is_last = progress, last_bytes, False
        self._done = self._total = 0

    def begin(self, stage_bytes: int) -> None:
        """Begin a stage before the last stage. A call may have several, as when it repeats one."""
        self._total = self._done + stage_bytes + self._last_bytes

    def begin_last(self) -> None:
        """Begin the last stage."""
        self._total, self._is_last = self._done + self._last_bytes, True

    def add(self, done_bytes: int) -> None:
        """Count bytes that are done."""
        self._done += done_bytes
        if self._progress is None or self.error is not None:
            return
        try:
            self._progress(self._done, self._total)
        except Exception as error:
            if not self._is_last:
                raise
            self.error = error
