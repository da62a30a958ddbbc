"""Limits on the requests of an engine, and rules for failed requests."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError

__all__ = ["AdaptiveLimit", "Retries"]


# Used parts of the KV cache: below the first the limit grows, and from the second on it is cut.
_GROW_BELOW, _CUT_ABOVE = 0.6, 0.9
_INCREASE, _CUT = 4, 0.8
# A queue longer than 1 / 8 of the limit means that the engine is full.
_QUEUED = 8


class AdaptiveLimit:
    """A limit on requests in flight that follows the reports of the engine.

    A report raises the limit by 4 requests if the limit is reached and less than 0.6 of the KV
    cache is used. It cuts the limit if 0.9 of the cache is used, requests were preempted, or more
    than 1 / 8 of the limit are queued. The new limit is then 0.8 times the old limit or the
    requests in flight, whichever is less. Preemption is costly, because the engine computes
    preempted requests twice. Pass the object as `max_in_flight`, and call `observe` at every poll
    of the engine. Local, without a clock.

    Args:
        start: the first limit.
        most: the largest limit.
        least: the smallest limit.

    Raises:
        UsageError: the limits are not in ascending order.

    Source: Chiu and Jain 1989; prime-rl's dispatcher has such a controller.
    """

    def __init__(self, *, start: int, most: int, least: int = 1) -> None:
        if not 1 <= least <= start <= most:
            raise UsageError(
                f"AdaptiveLimit needs 1 <= least <= start <= most; got {least}, {start} and {most}"
            )
        self.limit, self.least, self.most = start, least, most
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
        if kv_used >= _CUT_ABOVE or more > 0 or waiting * _QUEUED > self.limit:
            self.limit = max(self.least, int(min(self.limit, in_flight) * _CUT))
        elif kv_used < _GROW_BELOW and in_flight >= self.limit:
            self.limit = min(self.most, self.limit + _INCREASE)
        return self.limit


@dataclass(frozen=True)
class Retries:
    """The attempts of a rollout, and the failures after which the training run ends.

    Mistakes in code are not tried again, and end the attempts of a rollout. These are TypeError,
    NameError, AttributeError, ImportError, SyntaxError and NotImplementedError.

    Args:
        attempts: of one rollout. After the last attempt, its prompt leaves the run.
        backoff_s: the wait before the second attempt. It doubles for each later attempt.
        give_up_after: after this number of groups fail in a row, the last error ends the run. If
            an engine has died, every group fails.

    Raises:
        UsageError: a number is out of range.
    """

    attempts: int = 3
    backoff_s: float = 1.0
    give_up_after: int = 8

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.give_up_after < 1 or self.backoff_s < 0:
            raise UsageError(
                "Retries needs attempts >= 1, give_up_after >= 1 and backoff_s >= 0; got "
                f"{self.attempts}, {self.give_up_after}, {self.backoff_s}"
            )

    def wait_s(self, attempt: int) -> float:
        """Seconds between attempt number `attempt`, which counts from 1, and the next. Pure."""
        return self.backoff_s * 2.0 ** (attempt - 1)
