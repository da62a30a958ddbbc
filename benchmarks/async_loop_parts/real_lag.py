"""The lag that `predict_lag` foretells against that of a loop in real time: about three minutes.

Engines that sleep 0.05 s a token, a trainer that sleeps: the machine's clock, asyncio's timers and
the loop's own work are real, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from primeblocks.async_loop import AsyncLoop, Group, Rollout, RolloutBuffer, StalenessPolicy
from primeblocks.planning import LagPrediction, empirical, lognormal, predict_lag

__all__ = ["CASES", "RealCase", "measure"]

TOKEN_S = 0.05
TOKENS = lognormal(mean=12, sigma=0.6, maximum=40)  # 0.1 to 2 s
BATCH = 16
SETTLE = 20


@dataclass(frozen=True)
class RealCase:
    """A loop in real time; `predict_lag` has the arguments."""

    bound: int
    train_s: float
    in_flight: int
    steps: int
    publish_s: float = 0.03

    def predicted(self) -> LagPrediction:
        drawn = TOKENS.draw(np.random.default_rng(0), 1 << 14)
        return predict_lag(
            empirical((np.maximum(1, np.rint(drawn)) * TOKEN_S).tolist()),
            batch_size=BATCH,
            max_off_policy_steps=self.bound,
            max_in_flight=self.in_flight,
            train_s=self.train_s,
            publish_s=self.publish_s,
        )


# One for each limit: engines, staleness, trainer.
CASES = (RealCase(4, 0.3, 16, 100), RealCase(2, 0.2, 64, 170), RealCase(4, 0.6, 32, 100))


async def _measure(case: RealCase) -> tuple[float, float, float]:
    generator = np.random.default_rng(1)
    clock, version = asyncio.get_running_loop(), 0

    async def generate(prompt: int, *, version: int) -> Sequence[Rollout]:
        tokens = max(1, round(float(TOKENS.draw(generator, 1)[0])))
        begun, versions = clock.time(), []
        for token in range(tokens):
            versions.append(engine())
            await asyncio.sleep(begun + (token + 1) * TOKEN_S - clock.time())
        return [
            Rollout(
                tokens=np.zeros(tokens + 1, np.int64),
                prompt_length=1,
                logprobs=np.zeros(tokens),
                versions=np.array(versions),
                finish_reason="stop",
            )
        ]

    def engine() -> int:
        return version

    async def train(groups: Sequence[Group], *, version: int) -> None:
        await asyncio.sleep(case.train_s)

    async def publish(new: int) -> None:
        nonlocal version
        await asyncio.sleep(case.publish_s)
        version = new

    policy = StalenessPolicy(case.bound, "pace", "truncated importance sampling")
    loop = AsyncLoop(
        prompts=count(),
        generate=generate,
        train=train,
        publish=publish,
        buffer=RolloutBuffer(capacity=(case.bound + 1) * BATCH, staleness=policy),
        batch_size=BATCH,
        max_in_flight=case.in_flight,
    )
    groups, tokens, begun = [], [], 0.0
    async with loop:
        async for step in loop.steps(case.steps):
            if step.version <= SETTLE:
                begun = clock.time()
                continue
            groups += [step.version - 1 - group.version for group in step.groups]
            tokens += [age for age, many in step.lags.items() for _ in range(many)]
        steps_s = (clock.time() - begun) / (case.steps - SETTLE)
    return float(np.mean(groups)), float(np.mean(tokens)), steps_s


def measure(case: RealCase) -> tuple[float, float, float]:
    """Return the mean lag of a group, that of a token, and the seconds of a step."""
    return asyncio.run(_measure(case))


def main() -> None:
    for case in CASES:
        guess = case.predicted()
        print(case, f"limit {guess.limit}, settles in {guess.settle_steps:.0f} steps")
        pairs = zip((guess.group, guess.token, guess.step_s), measure(case), strict=True)
        for name, (predicted, real) in zip(("group", "token", "step_s"), pairs, strict=True):
            print(f"  {name:<7}{predicted:7.3f} predicted {real:7.3f} measured", end="")
            print(f"{predicted / real - 1:+8.1%}")


if __name__ == "__main__":
    main()
