"""Running means of the waits of rollouts, and when they are expected back."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Waits"]

_MEMORY = 64  # a mean follows the last of so many
_REASONS = 64  # others count as any wait
_RUNS = 1.5  # who runs waits later: half a mean wait, or more, from now
_LOST = 8  # who has waited so many times the mean may not come back


class _Mean:
    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.value += (value - self.value) / self.count


class Waits:
    """Means of the waits for each reason, and of the time between two services of the queue.

    Times are in ticks, the saves and loads of the tier, which is what its pages compete in.
    """

    def __init__(self) -> None:
        self._any, self._service = _Mean(), _Mean()
        self._by_reason: dict[Hashable, _Mean] = {}

    def add(self, reason: Hashable, ticks: float) -> None:
        """Add a wait that is over."""
        self._any.add(ticks)
        if reason in self._by_reason or len(self._by_reason) < _REASONS:
            self._by_reason.setdefault(reason, _Mean()).add(ticks)

    def add_service(self, ticks: float) -> None:
        """Add the time between two services of the queue."""
        self._service.add(ticks)

    def service(self, position: int) -> float:
        """Return the ticks until so many have been served."""
        return position * self._service.value

    def expected(self, reason: Hashable, *, age: int, queue: int, runs: bool = False) -> float:
        """Return the ticks of a wait, and of the queue behind it.

        Who has waited for much longer is expected after as long again, and so is everybody while
        nothing is known: that is the order of least recent use.
        """
        mean = self._any if runs else self._by_reason.get(reason, self._any)
        ticks = mean.value * (_RUNS if runs else 1) + self.service(queue)
        return float(age) if mean.count == 0 or age > _LOST * ticks else ticks
