"""The lag of rollouts in closed form.

Little's law, counted in steps: a group that is older by one at each update adds 1 to the sum of
lags, so the mean lag is the number of groups in the loop at an update, without the batch just
trained on, over the batch size. The derivation is in `docs/planning.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from .distribution import Distribution

__all__ = ["LagPrediction", "predict_lag"]

_MOST_AGES = 1000  # updates that a group may see: sums over ages end there


@dataclass(frozen=True)
class LagPrediction:
    """The result of `predict_lag`.

    Args:
        group: mean optimizer steps from the submission of a group to its training.
        token: mean optimizer steps from the policy that made a token to the one that trains on it.
        step_s: mean seconds of a step.
        settle_steps: steps until the lag is about that. Hundreds where trainer and engine are
            equally fast: a run that is not much longer sees a smaller lag.
        limit: "trainer", "engines" (`max_in_flight` bound) or "staleness" (admission bound).
    """

    group: float
    token: float
    step_s: float
    settle_steps: float
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
) -> LagPrediction:
    """Predict how old what a loop trains on is, and how long its steps are. Pure.

    For `on_stale` "pace" and "mask". The lag under "drop" and "wait" depends on the far tail, that
    under "continue" on the buffer: `simulate` runs those.

    Args:
        generate_s: seconds of one sample, at the load that the engine will have; of a whole group
            with `samples=1`. Measure them: `Group.generate_s` has them.
        batch_size: groups in a step.
        max_off_policy_steps: as in `StalenessPolicy`.
        max_in_flight: groups generated at a time.
        train_s: seconds of a step.
        publish_s: seconds after it that the trainer waits for the engine.
        samples: of a group, all begun at once.

    Raises:
        UsageError: a count or a time is out of range.
    """
    if min(batch_size, max_in_flight, samples) < 1 or max_off_policy_steps < 0:
        raise UsageError(
            "batch_size, max_in_flight and samples must be at least 1, the bound 0 or more; got "
            f"{batch_size}, {max_in_flight}, {samples} and {max_off_policy_steps}"
        )
    if not (0 <= train_s < math.inf and 0 <= publish_s < math.inf and train_s + publish_s > 0):
        raise UsageError(f"a step takes time, and ends; got {train_s} and {publish_s} s")
    group = generate_s.of_maximum(samples)
    loop = _Loop(
        generate_s, group, batch_size, max_off_policy_steps, max_in_flight, train_s + publish_s
    )
    if max_off_policy_steps == 0:
        return LagPrediction(0.0, 0.0, loop.synchronous_s(), 0.0, "staleness")
    return loop.predict()


@dataclass(frozen=True)
class _Loop:
    sample: Distribution  # seconds
    group: Distribution
    batch: int
    bound: int
    most: int  # in flight
    busy_s: float  # of the trainer

    @property
    def rate(self) -> float:
        """Groups a second when as many as may be are in flight."""
        return self.most / self.group.mean

    def predict(self) -> LagPrediction:
        step_s = self.step_s()
        cap = float(self.bound * self.batch)
        came = self.rate * self.busy_s  # while the trainer was busy
        room, drift = cap - self.most - came, came - self.batch
        left = settle = 0.0
        if room > 0:
            variance = max(1e-9, came * self.group.variation**2)
            left = _left_over(drift, variance, room)
            # Little by little where nothing drives it.
            settle = left / max(abs(drift), variance / 2 / max(left, 1e-9))
        if room > 0 and drift < 0:
            limit, present = "engines", min(cap, self.most + came + left)
            # One has just been submitted when a batch is complete.
            tokens = self._steady(self.most - 1, present - self.most) + self._made(self.busy_s)
        else:
            trains = room > 0 or step_s < self.busy_s * 1.001
            limit = "trainer" if trains else "staleness"
            present = min(cap, self.most + came + left) if room > 0 else cap
            tokens = self._paced(step_s, present)
        return LagPrediction(
            group=present / self.batch,
            token=tokens / self.batch,
            step_s=step_s,
            settle_steps=self.bound + settle,
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

    def step_s(self) -> float:
        """Return the mean seconds of a step."""
        low, high = self.busy_s, self.busy_s + self.group.of_maximum(self.batch).mean
        high = max(high, 4 * self.batch / self.rate + self.busy_s)
        if self._enough(low):
            return low
        for _ in range(60):
            step_s = (low + high) / 2
            low, high = (low, step_s) if self._enough(step_s) else (step_s, high)
        return high

    def _enough(self, step_s: float) -> bool:
        """Say whether steps of this length find their batches finished, on average."""
        if (self.batch + self._held_back()) / self.rate > step_s:
            return False
        # A batch is submitted at each update. Of those at most `bound` batches may be unfinished.
        unfinished, wait_s = 0.0, step_s - self.busy_s
        for age in range(_MOST_AGES):
            share = self.group.above(wait_s + age * step_s)
            unfinished += share
            if share < 1e-9 or unfinished > self.bound:
                break
        return unfinished <= self.bound

    @property
    def stopped_s(self) -> float:
        """Seconds at the end of a step in which admission lets nothing be submitted.

        While the trainer is busy, what ends is not replaced once `bound` batches are there.
        """
        return max(0.0, self.busy_s - max(0, self.bound * self.batch - self.most) / self.rate)

    def _held_back(self) -> float:
        """Return the groups a step that the engine does not make because of that."""
        if self.most > self.bound * self.batch:
            return 0.0
        ran = np.minimum(self.group.values, self.stopped_s)
        empty_s = float(self.group.weights @ (ran * (self.stopped_s - ran / 2))) / self.group.mean
        return self.rate * empty_s

    def _made(self, age_s: float) -> float:
        """Return the tokens of a mean group at this age: 1 for a whole one.

        A sample has tokens in proportion to time: the lesser of its age and its length.
        """
        sample = self.sample
        return float(sample.weights @ np.minimum(sample.values, age_s)) / sample.mean

    def _late(self, age_s: float, limit_s: float) -> float:
        """Return the part of that which is in groups that take longer than `limit_s`."""
        times, samples = self.sample.values, self.sample.above(limit_s)
        short = np.where(times <= limit_s, np.minimum(times, age_s), 0.0)
        others = (1 - self.group.above(limit_s)) / (1 - samples) if samples < 1 else 0.0
        return self._made(age_s) - float(self.sample.weights @ short) * others / self.sample.mean

    def _steady(self, in_flight: float, waiting: float, *, stopped_s: float = 0.0) -> float:
        """Return the tokens if groups are submitted whenever one has ended, and wait when done.

        Args:
            in_flight: until `stopped_s` ago; since then none was submitted.
            waiting: groups that were done then.
        """
        longest = float(self.group.values[0])
        ages = (np.arange(512) + 0.5) / 512 * longest
        mean = np.mean([self._late(age + stopped_s, age) for age in ages])
        return in_flight * float(mean) * longest / self.group.mean + waiting

    def _in_bursts(self, step_s: float, present: float) -> tuple[float, float]:
        """Return groups in flight and all tokens, if a batch is submitted at each update.

        The oldest are trained on first: what was done when the trainer began its step and still
        waits is the youngest. What has become done since then waits whatever its age.
        """
        left, running, ready, tokens = present / self.batch, 0.0, 0.0, 0.0
        early = []
        for age in range(1, _MOST_AGES):
            age_s = age * step_s
            then_s = age_s - self.busy_s
            share, done = self.group.above(age_s), 1 - self.group.above(then_s)
            running, ready, left = running + share, ready + done, left - (1 - done)
            early.append((done, self._made(then_s) - self._late(then_s, then_s)))
            tokens += self._made(age_s) - early[-1][1]
            if share < 1e-9 and ready >= left:
                break
        for share, held in early:
            waits = min(1.0, max(0.0, left) / share) if share else 0.0
            tokens, left = tokens + waits * held, left - waits * share
        return self.batch * running, self.batch * tokens

    def _paced(self, step_s: float, present: float) -> float:
        """Return the tokens where admission, not the engine, says when groups are submitted."""
        in_flight, bursts = self._in_bursts(step_s, present)
        if in_flight + self.batch <= self.most:
            return bursts
        # No room for a batch at an update: as in the engine's steady state, but for those that
        # end while admission is stopped, in whose place a burst comes.
        running = min(present, float(self.most))
        steady = self._steady(running, present - running, stopped_s=self.stopped_s)
        ended = float(self.group.weights @ np.minimum(self.group.values, self.stopped_s))
        share = ended / self.group.mean
        return share * bursts + (1 - share) * steady


def _left_over(drift: float, variance: float, room: float) -> float:
    """Return the groups that a batch leaves behind: a random walk, reflected at 0 and at `room`."""
    slope = 2 * drift / variance
    if abs(slope * room) < 1e-6:
        return room / 2
    if abs(slope * room) > 500:
        return max(0.0, math.copysign(room, slope)) - 1 / slope
    return room / -math.expm1(-slope * room) - 1 / slope
