"""The real asynchronous loop in virtual time, with simulated engines and a simulated trainer.

`AsyncLoop` runs unchanged, with its buffer and scheduler. Only its callables are replaced: they
sleep in virtual time for as long as the measured work takes. The loop's own code decides which
rollouts wait, are dropped or are trained on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from ..async_loop.buffer import RolloutBuffer
from ..async_loop.loop import AsyncLoop
from ..async_loop.scheduler import Retries
from ..async_loop.staleness import StalenessPolicy
from ..async_loop.step import Step
from ..errors import UsageError
from .engine import EngineModel
from .virtual import VirtualClock, run_in_virtual_time
from .world import Seconds, Workload, World

__all__ = ["Simulation", "StepRecord", "simulate"]

_NEVER_S = 1e9  # deadlines are not what is simulated


@dataclass(frozen=True)
class StepRecord:
    """One step of a simulated loop.

    Args:
        engine_busy_s: seconds in which an engine ran requests, from the start of the simulation to
            the end of this step, averaged over engines. Pauses do not count.
        lags: for each group, the version at its training minus the version at its submission.
        token_lag: the mean over tokens of the version at training minus the version that sampled
            the token.
        tokens: the number of tokens in each sample of the step.
        masked_tokens: the number of tokens that do not count in the loss because of their age.
        dropped: the number of groups that were dropped because of their age.
        failed: the number of attempts that raised an error.
        lost: the number of prompts that used up their attempts or were too old.
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
    """The result of `simulate`. Averages exclude the first `settle` steps.

    Args:
        steps: one record per step.
        settle: the number of first steps that the averages exclude.
        sampled_tokens: the number of tokens in each sample that began and did not fail, in the
            order in which the samples began.
    """

    steps: tuple[StepRecord, ...]
    settle: int
    sampled_tokens: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"<Simulation of {len(self.steps)} steps: {self.step_s:.4g} s a step>"

    @property
    def settled(self) -> tuple[StepRecord, ...]:
        """The steps that averages include."""
        return self.steps[self.settle :]

    @property
    def total_s(self) -> float:
        return self.steps[-1].end_s

    @property
    def step_s(self) -> float:
        return self.settled_s / len(self.settled)

    @property
    def trainer_idle(self) -> float:
        """The share of time in which the trainer waited for rollouts."""
        return sum(step.trainer_idle_s for step in self.settled) / self.settled_s

    @property
    def engine_idle(self) -> float:
        """The share of time in which an engine ran 0 requests or paused, averaged over engines."""
        before = self.steps[self.settle - 1].engine_busy_s if self.settle else 0.0
        return 1 - (self.steps[-1].engine_busy_s - before) / self.settled_s

    @property
    def lag(self) -> float:
        """Mean number of optimizer steps from a group's submission to the group's training."""
        return float(np.mean([lag for step in self.settled for lag in step.lags]))

    @property
    def token_lag(self) -> float:
        """Mean number of optimizer steps between a token's policy and the token's training."""
        sizes = [sum(step.tokens) for step in self.settled]
        return float(np.average([step.token_lag for step in self.settled], weights=sizes))

    @property
    def lags(self) -> dict[int, int]:
        """The number of groups by lag. A lag is a number of optimizer steps."""
        return dict(sorted(Counter(lag for step in self.settled for lag in step.lags).items()))

    @property
    def dropped(self) -> int:
        """Number of groups that were dropped because of their age."""
        return sum(step.dropped for step in self.settled)

    @property
    def failed(self) -> int:
        return sum(step.failed for step in self.settled)

    @property
    def masked(self) -> float:
        """The share of trained tokens that do not count in the loss because of their age."""
        every = sum(sum(step.tokens) for step in self.settled)
        return sum(step.masked_tokens for step in self.settled) / every

    @property
    def trained_tokens(self) -> NDArray[np.float64]:
        """Number of tokens in each trained sample."""
        return np.array([tokens for step in self.settled for tokens in step.tokens])

    @property
    def settled_s(self) -> float:
        """Total seconds of the steps that averages include."""
        return self.total_s - (self.steps[self.settle - 1].end_s if self.settle else 0.0)

    def table(self) -> str:
        """Return the averages as text."""
        groups = sum(self.lags.values())
        shares = ", ".join(f"{lag}: {n / groups:.0%}" for lag, n in self.lags.items())
        trained, sampled = self.trained_tokens, self.sampled_tokens
        rows = {
            "steps": f"{len(self.settled)} of {len(self.steps)}",
            "seconds a step": f"{self.step_s:.4g}",
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


def simulate(
    workload: Workload,
    *,
    engines: Sequence[EngineModel],
    train_s: Seconds,
    staleness: StalenessPolicy,
    batch_size: int,
    max_in_flight: int,
    publish_s: float = 0.0,
    pause_s: float = 0.0,
    by_sample: bool = False,
    retries: Retries | None = None,
    steps: int = 100,
    settle: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> Simulation:
    """Run `AsyncLoop` with its buffer and scheduler for `steps` steps in virtual time. Local.

    The samples of a prompt depend only on `workload`, `seed`, the prompt's ordinal and the attempt.
    Simulations with equal `workload` and `seed` therefore use the same samples.

    The call blocks its thread. From a coroutine, call `simulate` in another thread.

    Args:
        workload: the lengths of answers, the number of turns, and the latency of tools.
        engines: the simulated engines. Each request goes to the engine with the fewest requests
            (`serving.least_loaded`).
        train_s: seconds of a training step, or a function from the number of tokens in a batch to
            seconds.
        staleness: the loop's policy for stale rollouts.
        batch_size: the number of groups in a step.
        max_in_flight: the maximum number of requests at a time. A request asks for a group, or for
            one sample if `by_sample` is True.
        publish_s: seconds after a training step until engines have the new weights. The trainer
            waits during `publish_s`.
        pause_s: the number of seconds that engines pause, at the end of `publish_s`.
        by_sample: request single samples, as `AsyncLoop` does if you pass `group_size`.
        retries: the rule for retries of failed samples.
        steps: the number of steps to simulate.
        settle: the number of first steps that the averages exclude.
        seed: the seed of all random numbers.
        progress: a function that is called after each step with the number of simulated steps and
            `steps`.

    Raises:
        UsageError: `engines` is empty, `settle` is not below `steps`, `pause_s` is longer than
            `publish_s`, or `train_s` is neither seconds nor a function.
    """
    if not engines or not 0 <= settle < steps or not 0 <= pause_s <= publish_s:
        raise UsageError(
            "simulate needs an engine, settle < steps and pause_s <= publish_s; got "
            f"{len(engines)} engines, {settle=}, {steps=}, {pause_s=} and {publish_s=}."
        )
    if not callable(train_s) and not (isinstance(train_s, Real) and train_s >= 0):
        raise UsageError(
            f"train_s must be seconds of 0 or more, or a function of the tokens; got {train_s!r}. "
            "For steps of random length, pass a function that draws them."
        )
    clock = VirtualClock()
    capacity = (staleness.max_off_policy_steps + 1) * batch_size

    async def main() -> Simulation:
        world = World(workload, engines, train_s, (publish_s - pause_s, pause_s), seed)
        loop = AsyncLoop(
            prompts=world.prompts(),
            generate=world.generate,
            train=world.train,
            publish=world.publish,
            buffer=RolloutBuffer(capacity=capacity, staleness=staleness, clock=clock),
            batch_size=batch_size,
            max_in_flight=max_in_flight,
            group_size=workload.samples if by_sample else None,
            retries=retries,
            step_timeout_s=_NEVER_S,
            clock=clock,
        )
        records = []
        async with loop:
            async for step in loop.steps(steps):
                records.append(_record(step, world))
                if progress is not None:
                    progress(len(records), steps)
        return Simulation(tuple(records), settle, np.array(world.sampled))

    return run_in_virtual_time(main())


def _record(step: Step, world: World) -> StepRecord:
    """Return the record of a step that has just ended."""
    trained_by, lags, tokens = step.version - 1, [], []
    token_lag = masked = 0.0
    for group in step.groups:
        lags.append(trained_by - group.version)
        tokens.extend(group.prompt.sizes())
        for sample, spans in group.prompt.spans.items():
            token_lag += sum((trained_by - made_by) * size for made_by, size in spans)
            counts = group.rollouts[sample].loss_mask
            masked += sum(size for (_, size), c in zip(spans, counts, strict=True) if not c)
    return StepRecord(
        end_s=asyncio.get_running_loop().time(),
        trainer_idle_s=step.trainer_idle_s,
        engine_busy_s=sum(engine.busy_s for engine in world.engines) / len(world.engines),
        lags=tuple(lags),
        token_lag=token_lag / sum(tokens),
        tokens=tuple(tokens),
        masked_tokens=masked,
        dropped=step.dropped,
        failed=sum(step.failures.values()),
        lost=len(step.lost),
    )
