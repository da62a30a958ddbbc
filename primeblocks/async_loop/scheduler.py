"""Admission of new groups to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError

__all__ = ["Admission"]


@dataclass(frozen=True)
class Admission:
    """Keeps the engine busy without starting what would be stale before it is trained on.

    The trainer uses up `batch_size` groups a step, so a group behind
    `(max_off_policy_steps + 1) * batch_size` others cannot be trained on in time.

    Raises:
        UsageError: a limit is not positive.

    Source: the capacity law of AReaL, arXiv:2505.24298, section 5.1.
    """

    batch_size: int
    max_off_policy_steps: int
    max_in_flight: int

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.max_in_flight < 1:
            raise UsageError(
                f"batch_size and max_in_flight must be positive; got {self.batch_size} and "
                f"{self.max_in_flight}"
            )

    def room(self, *, in_flight: int, finished: int) -> int:
        """Return how many more groups to start. Pure.

        Args:
            in_flight: groups being generated.
            finished: groups generated and not yet trained on.
        """
        admissible = (self.max_off_policy_steps + 1) * self.batch_size - in_flight - finished
        return max(0, min(self.max_in_flight - in_flight, admissible))
