"""Limits on the requests of an engine, and rules for failed requests."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError

__all__ = ["AdaptiveLimit", "Retries"]


# A queue longer than 1 / 8 of the limit means that the engine is full.
_QUEUED = 8


class AdaptiveLimit:
    """A limit on requests in flight that follows the reports of the engine.

    The limit grows by `increase` while it is reached and the KV cache has room. It is multiplied by
    `cut` as soon as the cache is nearly full, or if requests are preempted or queued. An engine
    computes preempted requests twice. Pass the object as `max_in_flight`, and call `observe` at
    every poll of the engine. Local, without a clock.

    Args:
        start: the first limit.
        most: the largest limit.
        least: the smallest limit.
        grow_below: the used part of the KV cache below which the limit grows.
        cut_above: the used part of the KV cache from which the limit is cut.
        increase: the requests to add when the limit grows.
        cut: the factor to multiply by when the limit is cut.

    Raises:
        UsageError: the limits or the parts are not in ascending order, or `increase` or `cut` is
            out of range.

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
                "needs 1 <= least <= start <= most and 0 < grow_below < cut_above <= 1; got "
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
        """Return the new limit, given a report of the engine.

        Args:
            kv_used: the used part of the KV cache, from 0 to 1.
            in_flight: the requests that the engine has.
            preempted: all requests preempted since the engine started. The count only grows.
            waiting: requests in the engine's queue that do not run yet.
        """
        more, self._preempted = preempted - self._preempted, preempted
        if kv_used >= self.cut_above or more > 0 or waiting * _QUEUED > self.limit:
            self.limit = max(self.least, int(min(self.limit, in_flight) * self.cut))
        elif kv_used < self.grow_below and in_flight >= self.limit:
            self.limit = min(self.most, self.limit + self.increase)
        return self.limit


@dataclass(frozen=True)
class Retries:
    """The attempts of a rollout, and the failures after which the training run ends.

    Mistakes in code are not tried again, and end the attempts of a rollout. These are TypeError,
    NameError, AttributeError, ImportError, SyntaxError and NotImplementedError.

    Args:
        attempts: of one rollout. After the last, its group leaves the run with its prompt.
        backoff_s: the wait before the second attempt. It doubles for each later attempt.
        give_up_after: after this number of groups fail in a row, the last error ends the run. If
            an engine is gone, every group fails.

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
        """Seconds between attempt number `attempt`, which counts from 1, and the next. Pure."""
        return self.backoff_s * 2.0 ** (attempt - 1)
