"""The loop in virtual time against closed forms: throughput, speed-up, lag. No wall-clock in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.async_loop_parts import marin
from primeblocks.async_loop import StalenessPolicy
from primeblocks.planning import (
    CostTable,
    Distribution,
    EngineModel,
    LagPrediction,
    Simulation,
    SplitPlan,
    Workload,
    lognormal,
    pareto,
    plan_split,
    predict_lag,
    simulate,
)

__all__ = ["SPREADS", "Case", "cases", "compare", "figures", "planned"]

CORRECTION = "truncated importance sampling"
SPREADS: Mapping[str, Distribution] = {
    "lognormal 0.5": lognormal(mean=10, sigma=0.5),
    "lognormal 1.0": lognormal(mean=10, sigma=1.0, maximum=60),
    "pareto 2.2": pareto(mean=10, alpha=2.2, maximum=100),
}


@dataclass(frozen=True)
class Case:
    """A loop whose lag is predicted.

    Args:
        spread: of the seconds of a sample.
        bound: `max_off_policy_steps`.
        train_s: seconds of a step; a publish takes one more.
        in_flight: groups at a time, in batches.
        samples: of a group.
    """

    spread: str
    bound: int
    train_s: float
    in_flight: float
    samples: int
    batch_size: int = 32

    def predicted(self) -> LagPrediction:
        return predict_lag(
            SPREADS[self.spread],
            batch_size=self.batch_size,
            max_off_policy_steps=self.bound,
            max_in_flight=int(self.in_flight * self.batch_size),
            train_s=self.train_s,
            publish_s=1.0,
            samples=self.samples,
        )

    def simulated(self, *, steps: int = 120, seed: int = 1) -> Simulation:
        """Run it with engines that give each request 1,000 tokens a second, whatever their load.

        The mean is taken over `steps`, once the lag has settled.
        """
        settle = 30 + round(2 * self.predicted().settle_steps)
        return simulate(
            Workload(SPREADS[self.spread].scaled(1000), samples=self.samples),
            engines=[EngineModel(lambda running: 1000.0 * running)],
            train_s=self.train_s,
            publish_s=1.0,
            staleness=StalenessPolicy(self.bound, "pace", CORRECTION),
            batch_size=self.batch_size,
            max_in_flight=int(self.in_flight * self.batch_size),
            steps=settle + steps,
            settle=settle,
            seed=seed,
        )


def cases() -> Iterator[Case]:
    """Yield the grid: spreads, bounds, trainers, engines."""
    for values in itertools.product(SPREADS, (1, 2, 4, 8), (3, 8, 15), (0.5, 1, 3), (1, 4)):
        yield Case(*values)


def compare(case: Case, *, steps: int = 120) -> tuple[float, float, float]:
    """Return the relative errors of a group's lag, a token's lag, and the seconds of a step."""
    guess, found = case.predicted(), case.simulated(steps=steps)
    pairs = (
        (guess.group, found.lag),
        (guess.token, found.token_lag),
        (guess.step_s, found.step_s),
    )
    first, second, third = (predicted / real - 1 for predicted, real in pairs)
    return first, second, third


def planned(
    *, train_s: float, gpus: int = 64, sigma: float = 0.8, bound: int = 4, steps: int = 60
) -> tuple[SplitPlan, Simulation]:
    """Plan a split, then simulate the loop that it is a plan of.

    Args:
        train_s: GPU seconds a sample of the trainer.
        sigma: of the lognormal lengths.
        bound: `max_off_policy_steps`.
    """
    lengths = lognormal(mean=1000, sigma=sigma, maximum=8000)
    # A decode step of 8 ms, and 0.05 ms more for each request, on each replica of 2 GPUs.
    sample_s = {
        (b, 2): (0.008 + 0.00005 * b) / b * lengths.mean for b in (1, 8, 16, 32, 64, 128, 256)
    }
    engine = CostTable(sample_s, weight_bytes=16e9, sample_bytes=0.2e9)
    trainer = CostTable({(1, 8): train_s / 8}, weight_bytes=256e9, sample_bytes=16e9)
    plan = plan_split(
        trainer, engine, gpus=gpus, batch_size=128, samples=8, memory_bytes=80e9,
        max_off_policy_steps=bound, lengths=lengths, publish_s=1.0,
    )  # fmt: skip
    running = plan.engine.micro_batch
    model = EngineModel({b: b / (0.008 + 0.00005 * b) for (b, _) in sample_s}, max_running=running)
    found = simulate(
        Workload(lengths, samples=8),
        engines=[model] * plan.engine.replicas,
        train_s=plan.trainer.step_s,
        publish_s=plan.publish_s,
        staleness=StalenessPolicy(bound, "pace", CORRECTION),
        batch_size=128,
        max_in_flight=1 << 20,
        by_sample=True,
        steps=steps,
        settle=steps // 3,
    )
    return plan, found


def figures() -> dict[str, tuple[float, str, str]]:
    """Return, by figure, (value, unit, peer): four minutes of one core, most of it the grid's."""
    runs = [planned(train_s=train_s) for train_s in (0.5, 2.0, 4.0, 12.0)]
    reached = min(plan.async_s / found.step_s for plan, found in runs)
    of_all = min(plan.bound_s / found.step_s for plan, found in runs)
    figures: dict[str, tuple[float, str, str]] = {
        "async_loop.throughput_over_bound": (reached, "ratio", "plan_split"),
        "async_loop.throughput_over_bound.fractions_of_gpus": (of_all, "ratio", "T + E over GPUs"),
    }
    sync_s = marin.run(marin.BRANCH[0]).total_s
    for on_stale, name in {"pace": "", "wait": ".wait", "drop": ".drop"}.items():
        gain = sync_s / marin.run(marin.BRANCH[4], on_stale=on_stale).total_s
        figures[f"async_loop.speedup_vs_sync.simulated{name}"] = gain, "ratio", "synchronous"
    rows = [marin.run(row).total_s / row.seconds - 1 for row in (*marin.BRANCH, *marin.STOCK)]
    worst = float(np.abs(rows).max())
    figures["async_loop.marin_rows_worst_error"] = worst, "ratio", "marin #8955"
    errors = np.abs([compare(case) for case in cases()])
    for name, column in {"": errors[:, 0], ".token": errors[:, 1], ".step": errors[:, 2]}.items():
        for what, value in {
            "": column.mean(), ".worst": column.max(), ".beyond_tenth": np.mean(column > 0.1)
        }.items():  # fmt: skip
            key = f"async_loop.lag_prediction_error{name}{what}"
            figures[key] = float(value), "ratio", "simulated"
    return figures
