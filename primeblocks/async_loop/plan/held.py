"""Tokens that the groups in a loop hold at an update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .distribution import Distribution

__all__ = ["MOST_AGES", "Held"]

MOST_AGES = 1000  # updates that a group may see: sums over ages end there


class Held:
    """Tokens of groups by their age, in units of a mean group's; groups relative to a batch.

    A sample has tokens in proportion to time: the lesser of its age and its length.

    Args:
        sample: seconds of one sample.
        samples: of a group, all begun at once.
    """

    def __init__(self, sample: Distribution, samples: int) -> None:
        self.sample, self.samples = sample, samples
        self.group = sample.of_maximum(samples)

    def made(self, age_s: float) -> float:
        """Return the tokens of a mean group at this age."""
        return float(self.sample.weights @ np.minimum(self.sample.values, age_s)) / self.sample.mean

    def late(self, age_s: float, limit_s: float) -> float:
        """Return the part of `made` that is in groups which take longer than `limit_s`."""
        times = self.sample.values
        short = np.where(times <= limit_s, np.minimum(times, age_s), 0.0)
        below = 1 - self.sample.above(limit_s)
        rest = float(self.sample.weights @ short) * below ** (self.samples - 1)
        return self.made(age_s) - rest / self.sample.mean

    def done(self, age_s: float) -> float:
        """Return the part of `made` that is in groups which are done at this age."""
        return self.made(age_s) - self.late(age_s, age_s)

    def steady(self, in_flight: float, waiting: float, *, stopped_s: float = 0.0) -> float:
        """Return the tokens if groups are submitted whenever one has ended, and wait when done.

        Args:
            in_flight: until `stopped_s` ago; since then none was submitted.
            waiting: groups that were done then.
        """
        longest = float(self.group.values[0])
        ages = (np.arange(512) + 0.5) / 512 * longest
        mean = np.mean([self.late(age + stopped_s, age) for age in ages])
        return in_flight * float(mean) * longest / self.group.mean + waiting

    def in_bursts(
        self, step_s: float, busy_s: float, *, present: float, attempts: float
    ) -> tuple[float, float]:
        """Return groups in flight and all tokens, if a batch is submitted at each update.

        The oldest are trained on first: what was done when the trainer began its step and still
        waits is the youngest. What has become done since then waits whatever its age.

        Args:
            present: groups in the loop, without the batch just trained on.
            attempts: groups submitted at an update.
        """
        left, running, ready, tokens = present / attempts, 0.0, 0.0, 0.0
        early = []
        for age in range(1, MOST_AGES):
            age_s = age * step_s
            share, done = self.group.above(age_s), 1 - self.group.above(age_s - busy_s)
            running, ready, left = running + share, ready + done, left - (1 - done)
            early.append((done, self.done(age_s - busy_s)))
            tokens += self.made(age_s) - early[-1][1]
            if share < 1e-9 and ready >= left:
                break
        for share, held in early:
            waits = min(1.0, max(0.0, left) / share) if share else 0.0
            tokens, left = tokens + waits * held, left - waits * share
        return attempts * running, attempts * tokens

    def in_order(self, steps_s: Sequence[float], bound: int) -> float:
        """Return the tokens if every batch is trained on `bound` updates after it was begun."""
        ends = np.concatenate([[0.0], np.cumsum(steps_s)])
        ages = np.concatenate([ends[age:] - ends[:-age] for age in range(1, bound + 1)])
        grid = np.linspace(0, float(self.sample.values[0]), 1024)
        made = np.interp(ages, grid, [self.made(age_s) for age_s in grid])
        return float(made.sum()) / len(steps_s)

    def thrown_away(
        self, step_s: float, limit_s: float, *, wait_s: float, bound: int
    ) -> tuple[float, float]:
        """Return what groups that are too late add up to over updates: their number, their tokens.

        A group that is not done `limit_s` after its submission stays until it is done and a batch
        is looked for, which is `wait_s` into a step at the latest.
        """
        count = tokens = 0.0
        for age in range(1, MOST_AGES):
            until_s = max(limit_s, (age - 1) * step_s + wait_s)
            share = self.group.above(until_s)
            if share < 1e-9 and age > bound:
                break
            count, tokens = count + share, tokens + self.late(age * step_s, until_s)
        return count, tokens
