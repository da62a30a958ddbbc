"""A limit on requests to an engine, and rules for failed requests."""

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
    cache is used. A report cuts the limit if at least 0.9 of the KV cache is used. Preempted
    requests or a queue longer than 1 / 8 of the limit also cut the limit. After a cut, the limit is
    0.8 times the old limit or 0.8 times the number of requests in flight, whichever is smaller.
    Preemption is costly, because the engine computes preempted requests twice. Pass the object as
    `max_in_flight` of `AsyncLoop`, and call `observe` with every report. The limit does not depend
    on a clock. Local.

    Args:
        start: the first limit, in requests.
        most: the largest limit, in requests.
        least: the smallest limit, in requests.

    Raises:
        UsageError: `1 <= least <= start <= most` is false.

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
        """Update the limit from a report of the engine, and return the new limit.

        Args:
            kv_used: the used fraction of the KV cache, from 0 to 1.
            in_flight: the number of requests that the engine runs or queues.
            preempted: the number of preemptions since the engine started, a counter that only
                grows.
            waiting: the number of requests in the engine's queue that do not run yet.
        """
        more, self._preempted = preempted - self._preempted, preempted
        if kv_used >= _CUT_ABOVE or more > 0 or waiting * _QUEUED > self.limit:
            self.limit = max(self.least, int(min(self.limit, in_flight) * _CUT))
        elif kv_used < _GROW_BELOW and in_flight >= self.limit:
            self.limit = min(self.most, self.limit + _INCREASE)
        return self.limit


@dataclass(frozen=True)
class Retries:
    """Limits on the attempts per rollout, and on the groups that fail in a row.

    A mistake in code ends the attempts of a rollout immediately. TypeError, NameError,
    AttributeError, ImportError, SyntaxError and NotImplementedError count as mistakes in code,
    except inside an ExceptionGroup.

    Args:
        attempts: the number of attempts per rollout, or per group if `generate` returns whole
            groups. If the last attempt fails, the prompt leaves the training run.
        backoff_s: seconds before the second attempt. The wait doubles for each later attempt.
        give_up_after: the number of groups that must fail in a row to end the training run with the
            last error. If more groups were in flight at the first failure, all of them must fail.
            For example, every group fails after the engine died.

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
        """Return the seconds to wait after attempt number `attempt`, counted from 1. Pure."""
        return self.backoff_s * 2.0 ** min(attempt - 1, 99)  # 2.0**1024 is too large for a float.
