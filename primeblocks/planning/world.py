"""The callables of a simulated loop: prompts, engines, a trainer, and publishing between them.

Lengths and durations are drawn from a `Distribution`, which is given by its quantile function.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import EngineError, UsageError
from ..rollout import Group, Rollout
from ..serving import Fleet
from .engine import EngineModel, SimulatedEngine

__all__ = [
    "Distribution",
    "Seconds",
    "Workload",
    "World",
    "constant",
    "empirical",
    "lognormal",
]

Seconds = float | Callable[[float], float]
_CHUNK = 1024  # prompts
Spans = list[tuple[int, float]]  # of a sample: tokens by the policy that made them, in order


# Midpoints of [0, 1] in v, where u = 1 - v**3. Half of them are in the upper eighth, and the last
# is 2e-12 from the end, so that the mean of a heavy tail is right.
_V = (np.arange(4096) + 0.5) / 4096
_LEVELS = 1 - _V**3
_WEIGHTS = 3 * _V**2 / np.sum(3 * _V**2)


@dataclass(frozen=True, eq=False)
class Distribution:
    """A distribution of positive numbers, such as tokens or seconds.

    Args:
        name: the name of the distribution in tables.
        quantile: a non-decreasing function from probabilities in (0, 1) to values, both float64
            arrays.
    """

    name: str
    quantile: Callable[[NDArray[np.float64]], NDArray[np.float64]]

    def __repr__(self) -> str:
        return f"<Distribution {self.name}: mean {self.mean:.4g}>"

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Draw `count` independent values. Local."""
        return self.quantile(generator.random(count))

    @cached_property
    def mean(self) -> float:
        return float(self.quantile(_LEVELS) @ _WEIGHTS)


def constant(value: float) -> Distribution:
    """Return a distribution with a single value. Pure.

    Raises:
        UsageError: the value is not positive and finite.
    """
    _positive(value=value)
    return Distribution(f"constant {value:.4g}", lambda u: np.full(np.shape(u), float(value)))


def lognormal(*, mean: float, sigma: float, maximum: float | None = None) -> Distribution:
    """Return a lognormal distribution that is cut off at `maximum`. Pure.

    Args:
        mean: the mean before the cut. After the cut, the mean is smaller.
        sigma: standard deviation of the logarithm, usually 0.9 to 1.2 for lengths of answers.
        maximum: values above `maximum` become `maximum`.

    Raises:
        UsageError: `mean` or `maximum` is not positive and finite, or `sigma` is negative.
    """
    _positive(mean=mean, maximum=maximum)
    if sigma < 0:
        raise UsageError(f"sigma must not be negative; got {sigma}.")
    centre, most = np.log(mean) - sigma**2 / 2, np.inf if maximum is None else maximum

    def quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
        values = np.exp(
            centre + sigma * torch.special.ndtri(torch.as_tensor(u, device="cpu")).numpy()
        )
        return np.minimum(values, most)

    return Distribution(f"lognormal sigma {sigma:g}", quantile)


def empirical(values: Sequence[float]) -> Distribution:
    """Return a distribution in which all measured values are equally likely. Pure.

    Raises:
        UsageError: `values` is empty, or a value is not positive and finite.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    if ordered.ndim != 1 or not ordered.size or not ordered[0] > 0 or not np.isfinite(ordered[-1]):
        raise UsageError(
            f"values must contain at least one number, all positive and finite; got {values!r:.60}."
        )

    def quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
        return ordered[np.minimum((np.asarray(u) * len(ordered)).astype(int), len(ordered) - 1)]

    return Distribution(f"{len(ordered)} measured values", quantile)


@dataclass(frozen=True)
class Workload:
    """The lengths of answers, the number of turns, and the latency of tools.

    Args:
        tokens: the number of tokens in a sample, over all turns.
        samples: the number of samples in a group.
        turns: the number of turns in a sample. All turns of a sample have equal lengths, with a
            tool call between two turns.
        tool_s: the latency of a tool in seconds, required if there are several turns.
        failure_rate: the probability that a sample fails with an error before its end.

    Raises:
        UsageError: `samples` or `turns` is below 1, `failure_rate` is outside of [0, 1), or `turns`
            is above 1 and `tool_s` is missing.
    """

    tokens: Distribution
    samples: int = 1
    turns: int = 1
    tool_s: Distribution | None = None
    failure_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.turns < 1 or not 0 <= self.failure_rate < 1:
            raise UsageError(
                "samples and turns must be at least 1 and failure_rate in [0, 1); got "
                f"{self.samples}, {self.turns} and {self.failure_rate}."
            )
        if self.turns > 1 and self.tool_s is None:
            raise UsageError(f"{self.turns} turns have tool calls between them. Pass tool_s.")


@dataclass(eq=False)
class _Prompt:
    """A prompt, and the latest attempt of each of its samples."""

    ordinal: int
    attempts: Counter[int] = field(default_factory=Counter)
    spans: dict[int, Spans] = field(default_factory=dict)

    def sizes(self) -> list[float]:
        """Return the tokens of each sample."""
        return [sum(size for _, size in spans) for spans in self.spans.values()]


class World:
    """Everything that a loop calls, in the time of the running event loop.

    Attributes:
        engines: the simulated engines.
        sampled: lengths, in order, of all samples that began and did not fail.

    Args:
        publish_s: two spans in order: the trainer waits, then engines pause, too.
    """

    def __init__(
        self,
        workload: Workload,
        engines: Sequence[EngineModel],
        train_s: Seconds,
        publish_s: tuple[float, float],
        seed: int,
    ) -> None:
        self.engines = [SimulatedEngine(model) for model in engines]
        self.sampled: list[float] = []
        self._ask = Fleet({str(place): each.generate for place, each in enumerate(self.engines)})
        self._workload = workload
        self._train_s, self._publish_s = train_s, publish_s
        self._seed = seed
        self._rollouts: dict[tuple[int, ...], Rollout] = {}
        self._drawn: dict[tuple[int, int], tuple[NDArray[np.float64], ...]] = {}

    def prompts(self) -> Iterator[_Prompt]:
        """Yield prompts without end."""
        return map(_Prompt, count())

    async def generate(
        self, prompt: _Prompt, *, version: int, sample: int | None = None
    ) -> Rollout | list[Rollout]:
        """Generate a group, or one sample of it.

        Raises:
            EngineError: a sample broke off.
        """
        if sample is not None:
            return await self._sample(prompt, sample)
        if self._workload.samples == 1:
            return [await self._sample(prompt, 0)]
        calls = [self._sample(prompt, i) for i in range(self._workload.samples)]
        try:
            async with asyncio.TaskGroup() as group:  # one that fails ends the others
                tasks = [group.create_task(call) for call in calls]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def train(self, groups: Sequence[Group], *, version: int) -> None:
        """Sleep for the time of a training step."""
        seconds = self._train_s
        if callable(seconds):
            seconds = seconds(sum(size for group in groups for size in group.prompt.sizes()))
        await asyncio.sleep(seconds)

    async def publish(self, version: int) -> None:
        """Sleep for the time of a publish, and give the engines the new version."""
        before_s, pause_s = self._publish_s
        await asyncio.sleep(before_s)
        if pause_s:
            for engine in self.engines:
                engine.pause()
            await asyncio.sleep(pause_s)
            for engine in self.engines:
                engine.resume()
        for engine in self.engines:
            engine.swap(version)

    async def _sample(self, prompt: _Prompt, sample: int) -> Rollout:
        attempt = prompt.attempts[sample]
        prompt.attempts[sample] += 1
        tokens, tools, breaks_at = self._draws(prompt.ordinal, sample, attempt)
        if breaks_at is not None:
            await self._turns(tokens * breaks_at, tools)
            raise EngineError(
                f"sample {sample} of prompt {prompt.ordinal} failed, as the simulation planned."
            )
        self.sampled.append(tokens)
        spans = prompt.spans[sample] = await self._turns(tokens, tools)
        return self._rollout(tuple(made_by for made_by, _ in spans))

    def _draws(
        self, ordinal: int, sample: int, attempt: int
    ) -> tuple[float, list[float], float | None]:
        """Return the tokens of a sample, its tools' seconds, and the share where it breaks off."""
        work, (chunk, place) = self._workload, divmod(ordinal, _CHUNK)
        if (chunk, attempt) not in self._drawn:
            # Draw for many prompts at once, because single draws cost more than all the rest.
            generator = np.random.default_rng([self._seed, chunk, attempt])
            shape = _CHUNK, work.samples
            tokens = work.tokens.draw(generator, _CHUNK * work.samples).reshape(shape)
            breaks = generator.random(shape)
            tools = np.zeros((*shape, work.turns - 1))
            if work.tool_s is not None:
                tools = work.tool_s.draw(generator, tools.size).reshape(tools.shape)
            self._drawn[chunk, attempt] = np.maximum(1.0, np.rint(tokens)), tools, breaks
        tokens, tools, breaks = self._drawn[chunk, attempt]
        share = breaks[place, sample] / work.failure_rate if work.failure_rate else 1.0
        return (
            float(tokens[place, sample]),
            tools[place, sample].tolist(),
            float(share) if share < 1 else None,
        )

    async def _turns(self, tokens: float, tools: list[float]) -> Spans:
        each = tokens / (len(tools) + 1)
        spans = await self._ask(each)
        for seconds in tools:
            await asyncio.sleep(seconds)
            more = await self._ask(each)
            if spans[-1][0] == more[0][0]:
                more[0] = (more[0][0], spans.pop()[1] + more[0][1])
            spans = spans + more
        return spans

    def _rollout(self, policies: tuple[int, ...]) -> Rollout:
        """Return a rollout with one token for each policy that made a part of it."""
        if policies not in self._rollouts:
            size = len(policies)
            self._rollouts[policies] = Rollout(
                tokens=np.zeros(size + 1, np.int64),
                prompt_length=1,
                logprobs=np.zeros(size),
                versions=np.array(policies),
                finish_reason="stop",
            )
        return self._rollouts[policies]


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} must be positive and finite; got {value}.")
