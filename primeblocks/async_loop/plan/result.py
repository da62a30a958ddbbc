"""The outcome of a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Simulation", "StepRecord"]


@dataclass(frozen=True)
class StepRecord:
    """One step of a simulated loop.

    Args:
        end_s: when it ended.
        trainer_idle_s: seconds that the trainer waited for its batch.
        engine_busy_s: seconds until then in which an engine had a request, their mean.
        lags: for each group, the policy that trained on it minus that of its submission.
        token_lag: the same for its tokens, their mean.
        tokens: of each sample in it.
        masked_tokens: of these, those that do not count in the loss for their age.
        dropped: groups thrown away for their age.
        failed: attempts that raised.
        lost: prompts that used up their attempts.
    """

    end_s: float
    trainer_idle_s: float
    engine_busy_s: float
    lags: tuple[int, ...]
    token_lag: float
    tokens: tuple[float, ...]
    masked_tokens: float
    dropped: int
    failed: int
    lost: int


@dataclass(frozen=True, eq=False)
class Simulation:
    """The result of `simulate`; averages leave the first `settle` steps out.

    Args:
        steps: one record each.
        sampled_tokens: lengths of all samples that were begun and did not fail, in order.
        made_tokens: tokens that the engines made.
    """

    steps: tuple[StepRecord, ...]
    settle: int
    sampled_tokens: NDArray[np.float64]
    made_tokens: float

    def __repr__(self) -> str:
        return f"<Simulation of {len(self.steps)} steps: {self.step_s:.4g} s a step>"

    @property
    def settled(self) -> tuple[StepRecord, ...]:
        """The steps that averages are taken over."""
        return self.steps[self.settle :]

    @property
    def total_s(self) -> float:
        """Seconds of all steps, the first ones too."""
        return self.steps[-1].end_s

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self._span_s / len(self.settled)

    @property
    def groups_per_s(self) -> float:
        """Groups trained on in a second."""
        return sum(len(step.lags) for step in self.settled) / self._span_s

    @property
    def trainer_idle(self) -> float:
        """The share of time that the trainer waited for rollouts."""
        return sum(step.trainer_idle_s for step in self.settled) / self._span_s

    @property
    def engine_idle(self) -> float:
        """The share of time that an engine had no request."""
        before = self.steps[self.settle - 1].engine_busy_s if self.settle else 0.0
        return 1 - (self.steps[-1].engine_busy_s - before) / self._span_s

    @property
    def lag(self) -> float:
        """Mean lag of a group: optimizer steps from its submission to its training."""
        return float(np.mean([lag for step in self.settled for lag in step.lags]))

    @property
    def token_lag(self) -> float:
        """Mean lag of a token: optimizer steps since the policy that made it."""
        sizes = [sum(step.tokens) for step in self.settled]
        return float(np.average([step.token_lag for step in self.settled], weights=sizes))

    @property
    def lags(self) -> dict[int, int]:
        """The number of groups by lag."""
        return dict(sorted(Counter(lag for step in self.settled for lag in step.lags).items()))

    @property
    def dropped(self) -> int:
        """Groups thrown away for their age."""
        return sum(step.dropped for step in self.settled)

    @property
    def failed(self) -> int:
        """Attempts that raised."""
        return sum(step.failed for step in self.settled)

    @property
    def masked(self) -> float:
        """The share of trained tokens that do not count in the loss for their age."""
        every = sum(sum(step.tokens) for step in self.settled)
        return sum(step.masked_tokens for step in self.settled) / every

    @property
    def trained_tokens(self) -> NDArray[np.float64]:
        """Lengths of all samples trained on."""
        return np.array([tokens for step in self.settled for tokens in step.tokens])

    @property
    def _span_s(self) -> float:
        return self.total_s - (self.steps[self.settle - 1].end_s if self.settle else 0.0)

    def table(self) -> str:
        """Return the averages as text."""
        groups = sum(self.lags.values())
        shares = ", ".join(f"{lag}: {n / groups:.0%}" for lag, n in self.lags.items())
        trained, sampled = self.trained_tokens, self.sampled_tokens
        rows = {
            "steps": f"{len(self.settled)} of {len(self.steps)}",
            "seconds a step": f"{self.step_s:.4g}",
            "groups a second": f"{self.groups_per_s:.4g}",
            "trainer idle": f"{self.trainer_idle:.1%}",
            "engines idle": f"{self.engine_idle:.1%}",
            "lag of a group": f"{self.lag:.2f}  ({shares})",
            "lag of a token": f"{self.token_lag:.2f}",
            "groups dropped": f"{self.dropped} ({self.dropped / (groups + self.dropped):.1%})",
            "tokens masked": f"{self.masked:.1%}",
            "attempts failed": f"{self.failed}",
            "tokens trained": f"mean {trained.mean():.5g}, 99 % below {_percentile(trained):.5g}",
            "tokens sampled": f"mean {sampled.mean():.5g}, 99 % below {_percentile(sampled):.5g}",
        }
        return "\n".join(f"{name:<16} {value}" for name, value in rows.items())


def _percentile(values: NDArray[np.float64]) -> float:
    return float(np.percentile(values, 99))
