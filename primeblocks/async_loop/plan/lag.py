"""The lag of rollouts in closed form.

Little's law, counted in steps: a group that is older by one at each update adds 1 to the sum of
lags, so the mean lag is the number of groups in the loop at an update, without the batch just
trained on, over the batch size. The derivation is in `docs/async_loop.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...errors import UnsupportedError, UsageError
from .distribution import Distribution
from .held import MOST_AGES, Held

__all__ = ["LagPrediction", "predict_lag"]

_POLICIES = ("pace", "wait", "mask", "drop")


@dataclass(frozen=True)
class LagPrediction:
    """The result of `predict_lag`.

    Args:
        group: mean optimizer steps from the submission of a group to its training.
        token: mean optimizer steps from the policy that made a token to the one that trains on it.
        step_s: mean seconds of a step.
        in_flight: groups being generated at an update.
        dropped: groups thrown away for each one trained on; 0 but for "drop".
        limit: "trainer", "engines" (`max_in_flight` bound) or "staleness" (admission bound).
    """

    group: float
    token: float
    step_s: float
    in_flight: float
    dropped: float
    limit: str


def predict_lag(
    generate_s: Distribution,
    *,
    batch_size: int,
    max_off_policy_steps: int,
    max_in_flight: int,
    train_s: float,
    publish_s: float = 0.0,
    samples: int = 1,
    on_stale: str = "pace",
) -> LagPrediction:
    """Predict how old what a loop trains on is, and how long its steps are. Pure.

    Args:
        generate_s: seconds of one sample, at the load that the engine will have; of a whole group
            with `samples=1`. Measure them: `Group.generate_s` has them.
        batch_size: groups in a step.
        max_off_policy_steps: as in `StalenessPolicy`.
        max_in_flight: groups generated at a time.
        train_s: seconds of a step.
        publish_s: seconds after it that the trainer waits for the engine.
        samples: of a group, all begun at once.
        on_stale: as in `StalenessPolicy`. For "drop" an estimate: how many are thrown away depends
            on the far tail.

    Raises:
        UsageError: a count or a time is out of range.
        UnsupportedError: `on_stale` is "continue": nothing bounds the lag but the buffer.
    """
    if on_stale not in _POLICIES:
        raise UnsupportedError(
            f"on_stale must be one of {list(_POLICIES)}; got {on_stale!r}. simulate() runs it."
        )
    if min(batch_size, max_in_flight, samples) < 1 or max_off_policy_steps < 0:
        raise UsageError(
            "batch_size, max_in_flight and samples must be at least 1, the bound 0 or more; got "
            f"{batch_size}, {max_in_flight}, {samples} and {max_off_policy_steps}"
        )
    if train_s < 0 or publish_s < 0 or train_s + publish_s == 0:
        raise UsageError(f"a step takes time; got {train_s} and {publish_s} s")
    held = Held(generate_s, samples)
    loop = _Loop(held.group, batch_size, max_off_policy_steps, max_in_flight, train_s + publish_s)
    if max_off_policy_steps == 0:
        return LagPrediction(0.0, 0.0, loop.synchronous_s(), 0.0, 0.0, "staleness")
    return loop.predict(held, on_stale)


@dataclass(frozen=True)
class _Loop:
    group: Distribution
    batch: int
    bound: int
    most: int  # in flight
    busy_s: float  # of the trainer

    @property
    def rate(self) -> float:
        """Groups a second when as many as may be are in flight."""
        return self.most / self.group.mean

    def predict(self, held: Held, on_stale: str) -> LagPrediction:
        step_s, dropped = self.step_s(drops=on_stale == "drop")
        steps_s = self.ordered_steps_s(step_s) if on_stale == "wait" else []
        waits = bool(steps_s) and float(np.mean(steps_s)) > 1.001 * step_s
        if waits:
            step_s = float(np.mean(steps_s))
        present, limit = self.present(step_s, waits=waits)
        attempts = self.batch * (1 + dropped)
        count, wasted, mean = 0.0, 0.0, 1.0
        if limit == "engines":
            in_flight = float(self.most)
            # One has just been submitted when a batch is complete.
            tokens = held.steady(in_flight - 1, present - in_flight) + held.made(self.busy_s)
        else:
            in_flight, tokens = held.in_bursts(
                step_s, self.busy_s, present=present, attempts=attempts
            )
            if in_flight + attempts > self.most and not waits:
                # No room for a batch at an update: groups are submitted whenever one has ended.
                slots = min(present, float(self.most))
                steady = held.steady(slots, present - slots, stopped_s=self.stopped_s)
                ended = np.minimum(self.group.values, self.stopped_s) @ self.group.weights
                ended = float(ended) / self.group.mean
                tokens = ended * tokens + (1 - ended) * steady
            if waits:
                tokens = self.batch * held.in_order(steps_s, self.bound)
        if dropped:
            wait_s = step_s - self.busy_s
            late_s = self.bound * step_s + wait_s
            count, wasted = held.thrown_away(step_s, late_s, wait_s=wait_s, bound=self.bound)
            # Short ones are trained on: a mean batch has fewer tokens than mean groups have.
            mean = (1 - held.late(math.inf, late_s)) * (1 + dropped)
        return LagPrediction(
            group=max(0.0, (present - attempts * count) / self.batch),
            token=max(0.0, (tokens - attempts * wasted) / self.batch / mean),
            step_s=step_s,
            in_flight=min(in_flight, float(self.most)),
            dropped=dropped,
            limit=limit,
        )

    def synchronous_s(self) -> float:
        """Return the seconds of a step if all are submitted at once and the last is waited for."""
        if self.most >= self.batch:
            return self.busy_s + self.group.of_maximum(self.batch).mean
        # Those that find no room at first keep the engine full; then the last ones run out, which
        # at that moment have been running for a while: their residual times are waited for.
        full_s = (self.batch - self.most) / self.rate
        times, weights = self.group.values[::-1], self.group.weights[::-1]
        survivors = np.cumsum(weights[::-1])[::-1]
        gaps = np.diff(times, prepend=0.0)
        left = np.minimum(np.cumsum((survivors * gaps)[::-1])[::-1] / self.group.mean, 1)
        return self.busy_s + full_s + float(np.sum((1 - (1 - left) ** self.most) * gaps))

    def step_s(self, *, drops: bool) -> tuple[float, float]:
        """Return the mean seconds of a step, and groups dropped for each one trained on."""
        low, high = self.busy_s, self.busy_s + self.group.of_maximum(self.batch).mean
        high = max(high, 4 * self.batch / self.rate + self.busy_s)
        if self.enough(low, drops=drops):
            high = low
        for _ in range(60):
            step_s = (low + high) / 2
            low, high = (low, step_s) if self.enough(step_s, drops=drops) else (step_s, high)
        return high, self.dropped(high) if drops else 0.0

    def dropped(self, step_s: float) -> float:
        """Return the groups dropped for each one trained on: those not there in the last step."""
        late = self.group.above((self.bound + 1) * step_s - self.busy_s)
        return late / (1 - late) if late < 1 else math.inf

    def enough(self, step_s: float, *, drops: bool) -> bool:
        """Say whether steps of this length find their batches finished, on average."""
        attempts = 1 + self.dropped(step_s) if drops else 1.0
        if (attempts * self.batch + self.held_back()) / self.rate > step_s:
            return False
        # A batch is submitted at each update. Of those at most `bound` batches may be unfinished.
        unfinished, wait_s = 0.0, step_s - self.busy_s
        for age in range(MOST_AGES):
            share = self.group.above(wait_s + age * step_s)
            unfinished += attempts * share
            if share < 1e-9 or unfinished > self.bound:
                break
        return unfinished <= self.bound

    @property
    def stopped_s(self) -> float:
        """Seconds at the end of a step in which admission lets nothing be submitted.

        While the trainer is busy, what ends is not replaced once `bound` batches are there.
        """
        return max(0.0, self.busy_s - max(0, self.bound * self.batch - self.most) / self.rate)

    def held_back(self) -> float:
        """Return the groups a step that the engine does not make because of that."""
        return 0.0 if self.most > self.bound * self.batch else self.rate * self.idle_s

    @property
    def idle_s(self) -> float:
        ran = np.minimum(self.group.values, self.stopped_s)
        return float(self.group.weights @ (ran * (self.stopped_s - ran / 2))) / self.group.mean

    def ordered_steps_s(self, least_s: float) -> list[float]:
        """Return steps, each waiting for the slowest of the batch that may wait no longer.

        The mean is above that of the slowest over `bound + 1`: a long step is not made up for by
        short ones. So the recursion is run, on the quantiles of the slowest in a fixed order.
        """
        count = 1024
        levels = (np.random.default_rng(0).permutation(count) + 0.5) / count
        slowest = self.group.of_maximum(self.batch).quantile(levels)
        steps_s = [least_s] * self.bound
        for seconds in slowest.tolist():
            wait_s = seconds - sum(steps_s[-self.bound :])
            steps_s.append(max(least_s, self.busy_s + wait_s))
        return steps_s[self.bound :]

    def present(self, step_s: float, *, waits: bool) -> tuple[float, str]:
        """Return the groups in the loop at an update, without the batch trained on, and the limit.

        Args:
            waits: the trainer waits for old groups while others are there, as if it were busy.
        """
        cap = float(self.bound * self.batch)
        came = self.rate * (step_s if waits else self.busy_s)  # while the trainer was busy
        room = cap - self.most - came
        if room > 0:
            limit = "engines" if came < self.batch else "trainer"
            return min(cap, self.most + came + self._left_over(came, room)), limit
        return cap, "trainer" if step_s < self.busy_s * 1.001 else "staleness"

    def _left_over(self, came: float, room: float) -> float:
        """Groups that a batch leaves behind: a random walk, reflected at 0 and at `room`."""
        drift = came - self.batch
        variance = max(1e-9, came * self.group.variation**2)
        slope = 2 * drift / variance
        if abs(slope * room) < 1e-6:
            return room / 2
        if abs(slope * room) > 500:
            return max(0.0, math.copysign(room, slope)) - 1 / slope
        return room / -math.expm1(-slope * room) - 1 / slope
