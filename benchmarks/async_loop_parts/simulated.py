"""The loop in virtual time: throughput over the plan's, speed-up. No wall-clock in it."""

from __future__ import annotations

import numpy as np

from benchmarks.async_loop_parts import marin
from primeblocks.async_loop import StalenessPolicy
from primeblocks.planning import (
    CostTable,
    EngineModel,
    Simulation,
    SplitPlan,
    Workload,
    decode_latency,
    lognormal,
    plan_split,
    simulate,
)

__all__ = ["figures", "planned"]

CORRECTION = "truncated importance sampling"


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
        trainer, engine, gpus=gpus, batch_size=128 * 8, memory_bytes=80e9,
        max_off_policy_steps=bound, publish_s=1.0,
    )  # fmt: skip
    running = plan.engine.micro_batch
    model = EngineModel(decode_latency(step_s=0.008, request_s=0.00005), max_running=running)
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
    """Return, by figure, (value, unit, peer): a minute of one core."""
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
    return figures
