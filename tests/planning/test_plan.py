"""Distributions, the division of GPUs, and the lag in closed form."""

import itertools
import math

import numpy as np
import pytest
import torch

from primeblocks import planning
from primeblocks.errors import PlanError, UsageError

GB = 1e9


@pytest.mark.parametrize(
    "spread",
    [
        planning.constant(3.0),
        planning.lognormal(mean=10, sigma=1.0, maximum=100),
        planning.empirical([1.0, 2.0, 2.0, 30.0]),
    ],
    ids=lambda spread: spread.name,
)
def test_a_distribution_agrees_with_its_own_draws(spread):
    draws = spread.draw(np.random.default_rng(0), 200_000)
    error = 5 * max(draws.std(), 1e-9) / math.sqrt(len(draws)) + 1e-3 * spread.mean
    assert abs(draws.mean() - spread.mean) < error


def test_a_lognormal_has_the_mean_that_was_asked_for():
    assert planning.lognormal(mean=7, sigma=1.2).mean == pytest.approx(7, rel=1e-3)
    assert planning.lognormal(mean=7, sigma=1.2, maximum=7).mean < 7


@pytest.mark.parametrize(
    "broken",
    [
        lambda: planning.constant(0),
        lambda: planning.lognormal(mean=-1, sigma=1),
        lambda: planning.lognormal(mean=1, sigma=-1),
        lambda: planning.empirical([]),
        lambda: planning.empirical([1.0, math.inf]),
        lambda: planning.EngineModel(len, max_running=0),
        lambda: planning.decode_latency(step_s=0),
        lambda: planning.Workload(planning.constant(1), samples=0),
        lambda: planning.Workload(planning.constant(1), turns=2),
    ],
)
def test_nonsense_is_refused(broken):
    with pytest.raises(UsageError):
        broken()


def test_a_table_of_throughputs_is_refused():
    with pytest.raises(UsageError, match="tokens_per_s must be a function"):
        planning.EngineModel({1: 10.0})


def tables(*, trainer_s=3.0, engine_s=1.0, weights=0.0, sample_bytes=0.0):
    """Costs that do not depend on the micro-batch, on replicas of 1, 2 and 4 GPUs."""
    return [
        planning.CostTable(
            {(b, m): seconds / m for b in (1, 2, 4) for m in (1, 2, 4)},
            weight_bytes=weights,
            sample_bytes=sample_bytes,
        )
        for seconds in (trainer_s, engine_s)
    ]


def test_theta_equalises_both_sides():
    """LlamaRL: theta is the trainer's share of the GPU seconds, and both are busy all the time."""
    found = planning.plan_split(*tables(), gpus=64, batch_size=192, memory_bytes=GB)
    assert found.theta == 3 / 4
    assert found.trainer.step_s == found.engine.step_s == found.async_s == 12.0
    # Where memory is free, all GPUs in turn are just as fast: nothing is gained.
    assert found.together_s == found.bound_s == 12.0
    assert found.gain == 1.0


def brute_force(trainer, engine, *, gpus, samples, ahead, memory):
    """The least maximum over all divisions and choices, in plain loops."""

    def latency_s(table, many, degree):
        # A micro-batch takes b times the seconds a sample, in a straight line in between.
        times = {b: b * s for (b, m), s in table.sample_s.items() if m == degree}
        left = max(b for b in times if b <= many)
        right = min(b for b in times if b >= many)
        part = (many - left) / (right - left) if right > left else 0
        return times[left] * (1 - part) + times[right] * part

    def fitting(table, share):
        for b, m in table.sample_s:
            if share // m and (table.weight_bytes + b * table.sample_bytes) / m <= memory:
                yield b, m, share // m

    def trains(share):
        for b, m, replicas in fitting(trainer, share):
            left, step_s = math.ceil(samples / replicas), 0.0
            while left:
                step_s += latency_s(trainer, min(b, left), m)
                left -= min(b, left)
            yield step_s

    def generates(share):
        for b, m, replicas in fitting(engine, share):
            each = min(b, max(1, ahead * samples / replicas))
            yield samples / min(replicas, ahead * samples) * latency_s(engine, each, m) / each

    return min(
        max(one, other)
        for share in range(1, gpus)
        for one, other in itertools.product(trains(share), generates(gpus - share))
    )


def random_tables(generator):
    """Costs a sample that fall with the micro-batch, as a fixed part is shared by more."""
    return [
        planning.CostTable(
            {(b, m): (base + 2 / b) / m**power for b in (1, 2, 4, 8) for m in (1, 2, 3)},
            weight_bytes=float(generator.uniform(0, 4)),
            sample_bytes=float(generator.uniform(0, 1)),
        )
        for base, power in generator.uniform([0.5, 0.7], [2, 1], (2, 2))
    ]


@pytest.mark.parametrize("seed", range(6))
def test_the_best_division_is_found(seed):
    generator = np.random.default_rng(seed)
    trainer, engine = random_tables(generator)
    gpus, memory, ahead = int(generator.integers(6, 20)), 3.0, 1 + seed % 3
    samples = int(generator.integers(1, 40 if seed % 2 else 4))  # Also fewer than replicas.
    found = planning.plan_split(
        trainer, engine, gpus=gpus, batch_size=samples, memory_bytes=memory,
        max_off_policy_steps=ahead,
    )  # fmt: skip
    best = brute_force(trainer, engine, gpus=gpus, samples=samples, ahead=ahead, memory=memory)
    assert max(found.trainer.step_s, found.engine.step_s) == pytest.approx(best)
    assert found.async_s >= max(best, found.bound_s) * (1 - 1e-9)
    assert found.trainer.gpus + found.engine.gpus <= gpus
    for side in (found.trainer, found.engine):
        assert side.gpu_bytes <= memory


def test_memory_of_both_sides_on_the_same_gpus_costs_micro_batches():
    """The theorem: the gain is the memory, not the overlap."""
    seconds = {(b, 8): (1 + 8 / b) / 8 for b in (1, 2, 4, 8)}
    trainer = planning.CostTable(seconds, weight_bytes=240 * GB, sample_bytes=40 * GB)
    engine = planning.CostTable(seconds, weight_bytes=240 * GB, sample_bytes=40 * GB)
    options = {"gpus": 64, "batch_size": 64, "memory_bytes": 80 * GB}
    found = planning.plan_split(trainer, engine, **options)
    # 8 x 80 GB hold 240 + 8 x 40, or twice 240 and 40 twice more.
    assert (found.trainer.micro_batch, found.engine.micro_batch) == (8, 8)
    assert found.together_s == pytest.approx(64 / 8 * 2 * (1 + 8 / 2) / 8)
    assert found.async_s == pytest.approx(found.bound_s) == pytest.approx(64 / 8 * 2 * 2 / 8)
    assert found.gain == pytest.approx(2.5)


def test_what_does_not_fit_is_refused_with_numbers():
    with pytest.raises(PlanError, match=r"trainer needs at least 3e\+10 bytes on each of 4 GPUs"):
        planning.plan_split(*tables(weights=120 * GB), gpus=8, batch_size=8, memory_bytes=20 * GB)


@pytest.mark.parametrize(
    "broken",
    [
        {"gpus": 0}, {"gpus": 1}, {"batch_size": 0}, {"max_off_policy_steps": 0},
        {"memory_bytes": 0.0},
        {"memory_bytes": math.nan}, {"memory_bytes": math.inf}, {"publish_s": -1.0},
        {"publish_s": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range_are_refused(broken):
    options = {"gpus": 8, "batch_size": 8, "memory_bytes": GB, **broken}
    with pytest.raises(PlanError, match="must be"):
        planning.plan_split(*tables(), **options)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_costs_are_positive_and_finite(seconds):
    with pytest.raises(PlanError, match="positive"):
        planning.CostTable({(1, 1): seconds}, weight_bytes=0)
    with pytest.raises(PlanError, match="finite|positive"):
        planning.CostTable({(1, 0): 1.0}, weight_bytes=seconds)
    if seconds:
        with pytest.raises(PlanError, match="finite"):
            planning.CostTable({(1, 1): 1.0}, weight_bytes=0, sample_bytes=seconds)


def test_a_degree_that_was_not_measured_is_refused():
    table = planning.CostTable({(1, 2): 1.0, (4, 8): 1.0}, weight_bytes=0)
    with pytest.raises(PlanError, match=r"degree 4 was not measured.*\[2, 8\]"):
        table.batch_s(1, 4)


def test_the_table_has_both_sides_and_every_way_to_run():
    text = planning.plan_split(*tables(), gpus=64, batch_size=64, memory_bytes=GB).table()
    for words in ("trainer", "engine", "asynchronous", "all GPUs in turn", "bound", "gain"):
        assert words in text


def test_a_default_device_does_not_reach_distributions():
    with torch.device("meta"):
        assert planning.lognormal(mean=7, sigma=1.2).mean == pytest.approx(7, rel=1e-3)
