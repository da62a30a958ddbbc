"""A circuit breaker: how much a lower tier is given, from what it did with what it was given.

    CLOSED     Every page is written. Saves wait for the tier, `patience_s` at most.
    OPEN       The tier takes `room` pages, and each further page takes the place of another. If
               `room` is 0, no page is written. A silent tier is neither written to nor read.
    HALF_OPEN  One write at a time after a rest, a few to a slow tier. Saves do not wait for them.

    CLOSED -> HALF_OPEN      A page waited for the tier's writes longer than `patience_s`.
    any -> OPEN              The tier was full: its `room` is what it has. Or it refused a page for
                             which another had left: its `room` is 0. Or it was silent for
                             `patience_s`.
    OPEN -> HALF_OPEN        The rest is over, or a silent tier answered.
    HALF_OPEN -> CLOSED      A page was written. If the tier was slow or silent: nothing is under
                             way, and no page was skipped for `patience_s`.

A rest takes 1 s, and twice as long each time, up to 8 s: each trial may cost the tier a page, and a
disk that has room again should not wait long. After CLOSED the next rest takes 1 s again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from .moves import Recalled

__all__ = ["Breaker", "Circuit"]

_REST_S, _LONGEST_REST_S = 1.0, 8.0
_UNBOUNDED = 1 << 62


class Circuit(Enum):
    """State of a breaker."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class Breaker:
    """The circuit breaker of one tier.

    Args:
        patience_s: seconds that pages wait for the tier.
        clock: seconds.

    Attributes:
        writing: writes under way.
        room: pages that the tier takes, as of the last look at the circuit.
    """

    def __init__(self, *, patience_s: float, clock: Callable[[], float]) -> None:
        self.writing = self._moving = 0
        self._patience_s, self._clock = patience_s, clock
        self._circuit = Circuit.CLOSED
        self._rest_s = _REST_S
        self._retry_s = 0.0  # end of the rest
        self.room = _UNBOUNDED
        self._silent = False
        self._slow = False  # half open because it was slow or silent
        self._proven = False  # a page was written since it was half open, or it was only slow
        self._skipped_s = 0.0  # when a page was skipped last
        self._heard_s = 0.0
        self._waits_s: float | None = None  # since when a page waits for the writes under way
        self._recalled = False  # no move was given since the last recall

    def circuit(self) -> Circuit:
        """Return the state, after what the clock changes."""
        if self._circuit is Circuit.CLOSED and not self._moving:
            return self._circuit
        now_s = self._clock()
        if self._moving and now_s - self._heard_s > self._patience_s:
            self._silent = True
            self._open(now_s)
        elif self._circuit is Circuit.OPEN and now_s >= self._retry_s:
            self._half_open(now_s, slow=self._silent, proven=False)
        elif self._circuit is Circuit.CLOSED and self._waited_s(now_s) > self._patience_s:
            self._half_open(now_s, slow=True, proven=True)
        elif self._circuit is Circuit.HALF_OPEN and self._keeps_up(now_s):
            self._circuit, self._rest_s = Circuit.CLOSED, _REST_S
        return self._circuit

    def silent(self) -> bool:
        """Whether the tier answers nothing, and is left alone."""
        return self.circuit() is Circuit.OPEN and self._silent

    def skips(self, *, feed: int | None) -> bool:
        """Look at the circuit, and tell whether to skip a page.

        Args:
            feed: most writes at a time to a tier that is slow. None skips no page.
        """
        circuit = self.circuit()
        if circuit is Circuit.CLOSED or feed is None:
            return False
        match circuit:
            case Circuit.OPEN:
                skipped = self._silent or self.room == 0 or (self._late() and self.writing >= feed)
            case Circuit.HALF_OPEN:
                skipped = self.writing >= (feed if self._proven else 1)
        if skipped:
            self._skipped_s = self._clock()
        return skipped

    def unawaited(self) -> int:
        """Count the writes that saves do not wait for."""
        circuit = self.circuit()
        waits = circuit is Circuit.OPEN and not self._silent and not self._late()
        return 0 if waits or circuit is Circuit.CLOSED else self.writing

    def replaces(self) -> bool:
        """Whether another page may leave for one: after a rest for one at a time."""
        match self.circuit():
            case Circuit.CLOSED:
                return True
            case Circuit.OPEN:
                return self.room > 0
            case Circuit.HALF_OPEN:
                return self._proven or self.writing == 0

    def given(self, *, write: bool) -> None:
        """Take note that the tier has a move to answer."""
        if not self._moving:
            self._heard_s = self._clock()
        self._moving += 1
        self.writing += write
        self._recalled = False

    def heard(self, error: Exception | None, *, write: bool) -> None:
        """Take note that the tier answered a move, or did not begin it."""
        now_s = self._clock()
        self._moving -= 1
        self.writing -= write
        if not self.writing:
            self._waits_s = None
        if isinstance(error, Recalled):
            self._silent = True
            self._open(now_s)
            return
        self._heard_s, self._recalled = now_s, False
        if self._silent:
            self._half_open(now_s, slow=True, proven=False)
        if write and error is None and self._circuit is Circuit.HALF_OPEN:
            self._proven = True
            if not self._slow:
                self._circuit, self._rest_s = Circuit.CLOSED, _REST_S

    def refused(self, *, room: int) -> None:
        """Take note that the tier refused a page; until the next trial it takes `room` pages."""
        self.room = min(self.room, room)
        self._open(self._clock())

    def page_waits(self) -> bool:
        """Take note that a page waits for room; return whether to recall moves not begun."""
        if self.writing and self._waits_s is None:
            self._waits_s = self._clock()
        recall = self._moving > 0 and self.silent() and not self._recalled
        self._recalled |= recall
        return recall

    def _open(self, now_s: float) -> None:
        if self._circuit is not Circuit.OPEN or now_s >= self._retry_s:  # of many, the first counts
            self._retry_s = now_s + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        self._circuit = Circuit.OPEN

    def _half_open(self, now_s: float, *, slow: bool, proven: bool) -> None:
        self._circuit, self._silent, self.room = Circuit.HALF_OPEN, False, _UNBOUNDED
        self._slow, self._proven, self._skipped_s = slow, proven, now_s

    def _keeps_up(self, now_s: float) -> bool:
        skipped_s = now_s - self._skipped_s
        return self._proven and not self.writing and skipped_s > self._patience_s

    def _late(self) -> bool:
        return self._waited_s(self._clock()) > self._patience_s

    def _waited_s(self, now_s: float) -> float:
        return 0.0 if self._waits_s is None else now_s - self._waits_s
