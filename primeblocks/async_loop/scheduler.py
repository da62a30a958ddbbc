"""Limits on what an engine gets at a time, and rules for requests that fail."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError

__all__ = ["AdaptiveLimit", "Retries"]


# An engine whose queue holds more than this part (1 / 8) of the limit is full.
_QUEUED = 8


class AdaptiveLimit:
    """A limit on requests in flight that follows what the engine says of itself.

    Additive increase while the limit binds and the KV cache has room; multiplicative decrease at
    once where the cache is nearly full, or requests are preempted or wait: what an engine preempts
    it computes twice. Pass it as `max_in_flight`, and call `observe` at every poll of the engine.
    Local; a state machine without a clock.

    Args:
        start: the first limit.
        most: never more than that.
        least: never fewer.
        grow_below: part of the KV cache in use below which the limit grows.
        cut_above: part of the KV cache in use above which it is cut.
        increase: what is added.
        cut: what is left of it, as a factor.

    Raises:
        UsageError: the limits or the parts are not in ascending order.

    Source: Chiu and Jain 1989; prime-rl's dispatcher has such a controller.
    """

    def __init__(
        self,
        *,
        start: int,
        most: int,
        least: int = 1,
        grow_below: float = 0.6,
        cut_above: float = 0.9,
        increase: int = 4,
        cut: float = 0.8,
    ) -> None:
        if not 1 <= least <= start <= most or not 0 < grow_below < cut_above <= 1:
            raise UsageError(
                f"needs 1 <= least <= start <= most and 0 < grow_below < cut_above <= 1; got "
                f"{least}, {start}, {most} and {grow_below}, {cut_above}"
            )
        if increase < 1 or not 0 < cut < 1:
            raise UsageError(f"needs increase >= 1 and 0 < cut < 1; got {increase} and {cut}")
        self.limit, self.least, self.most = start, least, most
        self.grow_below, self.cut_above = grow_below, cut_above
        self.increase, self.cut = increase, cut
        self._preempted = 0

    def observe(
        self, *, kv_used: float, in_flight: int, preempted: int = 0, waiting: int = 0
    ) -> int:
        """Return the limit after what the engine reports.

        Args:
            kv_used: part of the KV cache in use, from 0 to 1.
            in_flight: requests that it has.
            preempted: requests preempted since it started; a count that only grows.
            waiting: requests in its queue that do not run yet.
        """
        more, self._preempted = preempted - self._preempted, preempted
        if kv_used >= self.cut_above or more > 0 or waiting * _QUEUED > self.limit:
            self.limit = max(self.least, int(min(self.limit, in_flight) * self.cut))
        elif kv_used < self.grow_below and in_flight >= self.limit:
            self.limit = min(self.most, self.limit + self.increase)
        return self.limit


@dataclass(frozen=True)
class Retries:
    """Attempts of a rollout, and failures after which the run gives up.

    Mistakes in code (TypeError, NameError, AttributeError, ImportError, SyntaxError,
    NotImplementedError) are not tried again: a rollout that raises one has no attempt left.

    Args:
        attempts: of one rollout; after the last its group leaves the run, with its prompt.
        backoff_s: before the second attempt, doubled for each one after it.
        give_up_after: groups that fail one after the other, none between them that does not; then
            the last error ends the run. An engine that is gone fails everything.

    Raises:
        UsageError: a number is out of range.
    """

    attempts: int = 3
    backoff_s: float = 1.0
    give_up_after: int = 8

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.give_up_after < 1 or self.backoff_s < 0:
            raise UsageError(
                "needs attempts >= 1, give_up_after >= 1 and backoff_s >= 0; got "
                f"{self.attempts}, {self.give_up_after}, {self.backoff_s}"
            )

    def wait_s(self, attempt: int) -> float:
        """Seconds before the attempt after number `attempt`, which counts from 1. Pure."""
        return self.backoff_s * 2.0 ** (attempt - 1)
