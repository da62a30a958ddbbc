"""The division of GPUs between trainer and engine, and whether a division helps at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import PlanError
from .costs import CostTable
from .distribution import Distribution, constant
from .lag import predict_lag
from .splitplan import Side, SplitPlan

__all__ = ["plan_split"]


def plan_split(
    trainer: CostTable,
    engine: CostTable,
    *,
    gpus: int,
    batch_size: int,
    memory_bytes: float,
    max_off_policy_steps: int = 1,
    samples: int = 1,
    lengths: Distribution | None = None,
    publish_s: float = 0.0,
    swap_s: float | None = None,
    trainer_gpus: int | None = None,
    worth: float = 1.1,
) -> SplitPlan:
    """Choose GPUs, model-parallel degrees and micro-batches of both sides. Pure; exhaustive.

    The asynchronous loop gives each side GPUs of its own: two memory constraints and two degrees.
    It is compared with the best of two synchronous ones: all GPUs do both in turn, with one degree
    and one memory constraint, or with the other side's memory moved out if `swap_s` is given; and
    the same two groups of GPUs take turns.

    Args:
        gpus: all of them.
        batch_size: groups in a step.
        memory_bytes: of a GPU.
        max_off_policy_steps: at most that many batches are generated ahead.
        samples: of a group.
        lengths: of samples, in any unit: what a synchronous loop waits for at the end of a batch.
            Default: all are equally long.
        publish_s: seconds after a step that the trainer waits for the engine.
        swap_s: seconds a step for moving the memory of one side out and that of the other in.
        trainer_gpus: the trainer's share, where that is settled.
        worth: the gain from which on the plan calls itself worth it.

    Raises:
        PlanError: nothing fits, or a number is out of range; with the least memory that would do.

    Source: arXiv:2505.24034, section 7. The derivation is in `docs/async_loop.md`.
    """
    if min(gpus, batch_size, samples, max_off_policy_steps) < 1 or memory_bytes <= 0:
        raise PlanError(
            "gpus, batch_size, samples, max_off_policy_steps and memory_bytes must be positive; got"
            f" {gpus}, {batch_size}, {samples}, {max_off_policy_steps} and {memory_bytes}"
        )
    task = _Task(
        trainer, engine, gpus, batch_size * samples, memory_bytes, publish_s, swap_s,
        constant(1.0) if lengths is None else lengths.scaled(1 / lengths.mean),
    )  # fmt: skip
    # While the last sample of a group is made, the others' places in the engine are empty.
    filled = samples * task.lengths.mean / task.lengths.of_maximum(samples).mean
    train, generate = task.apart(trainer_gpus, max_off_policy_steps * batch_size * filled)
    together_s, no_tail_s, free_s = task.together()
    engine_gpus = gpus - train.gpus if trainer_gpus is None else gpus - trainer_gpus
    in_turn = (task.ends_s(side) for side in task.sides(engine, engine_gpus, task.batch))
    running = generate.running / generate.replicas
    lag = predict_lag(
        task.lengths.scaled(float(engine.latency_s(running, generate.degree))),
        batch_size=batch_size,
        max_off_policy_steps=max_off_policy_steps,
        max_in_flight=max(1, round(generate.running / filled)),
        train_s=train.step_s,
        publish_s=publish_s,
        samples=samples,
    )
    return SplitPlan(
        gpus=gpus,
        trainer=train,
        engine=generate,
        async_s=max(train.step_s + publish_s, generate.step_s),
        together_s=together_s,
        apart_s=min(in_turn) + train.step_s + publish_s,
        no_tail_s=no_tail_s,
        free_s=free_s,
        bound_s=task.bound_s(),
        publish_s=publish_s,
        lag=lag.group,
        worth=worth,
    )


@dataclass(frozen=True)
class _Task:
    trainer: CostTable
    engine: CostTable
    gpus: int
    batch: int  # samples
    memory_bytes: float
    publish_s: float
    swap_s: float | None
    lengths: Distribution  # of mean 1

    def sides(self, table: CostTable, gpus: int, most: float) -> Iterator[Side]:
        """All choices for one side that fit, where there are `most` samples at a time."""
        for micro_batch, degree in table.choices():
            replicas = gpus // degree
            if not replicas or table.gpu_bytes(micro_batch, degree) > self.memory_bytes:
                continue
            running = min(micro_batch, max(1.0, most / replicas))
            yield Side(
                gpus=replicas * degree,
                degree=degree,
                micro_batch=micro_batch,
                running=running * replicas,
                step_s=self.batch / replicas * float(table.latency_s(running, degree)) / running,
                gpu_bytes=table.gpu_bytes(micro_batch, degree),
            )

    def apart(self, trainer_gpus: int | None, ahead: float) -> tuple[Side, Side]:
        """The fastest asynchronous choice; of several, that with the fewest GPUs in use."""
        shares = range(1, self.gpus) if trainer_gpus is None else [trainer_gpus]
        best: tuple[tuple[float, float], Side, Side] | None = None
        for share in shares:
            trains = _fastest(self.sides(self.trainer, share, self.batch))
            generates = _fastest(self.sides(self.engine, self.gpus - share, ahead))
            if trains is None or generates is None:
                continue
            times = trains.step_s + self.publish_s, generates.step_s
            key = max(times), sum(times)
            if best is None or key < best[0]:
                best = key, trains, generates
        if best is None:
            raise PlanError(
                f"no division of {self.gpus} GPUs of {self.memory_bytes:.4g} bytes fits: "
                f"{_least(self.trainer, 'the trainer')}, {_least(self.engine, 'the engine')}. Add"
                " GPUs, higher degrees or smaller micro-batches."
            )
        return best[1], best[2]

    def together(self) -> tuple[float, float, float]:
        """Seconds of a step on all GPUs in turn: as it is; without a tail; with free memory."""
        trains = list(self.sides(self.trainer, self.gpus, self.batch))
        generates = [
            (side, self.ends_s(side)) for side in self.sides(self.engine, self.gpus, self.batch)
        ]
        real = no_tail = free = math.inf
        for one in trains:
            for other, ends_s in generates:
                rest_s = one.step_s + self.publish_s
                free = min(free, rest_s + other.step_s)
                both = one.gpu_bytes + other.gpu_bytes
                if self.swap_s is not None:
                    rest_s += self.swap_s
                elif one.degree != other.degree or both > self.memory_bytes:
                    continue
                no_tail = min(no_tail, rest_s + other.step_s)
                real = min(real, rest_s + ends_s)
        return real, no_tail, free

    def bound_s(self) -> float:
        """GPU seconds of a batch, each side by its best choice alone, over the GPUs."""
        least = [
            min(
                degree * seconds
                for (micro_batch, degree), seconds in table.choices().items()
                if table.gpu_bytes(micro_batch, degree) <= self.memory_bytes
            )
            for table in (self.trainer, self.engine)
        ]
        return self.batch * sum(least) / self.gpus

    def ends_s(self, side: Side) -> float:
        """Seconds until the last sample of a batch is there.

        Replicas are full until no sample waits; then as many run as are longer than a length.
        """
        share = self.batch / side.replicas
        running = min(float(side.micro_batch), share)
        full_s = (share - running) * side.step_s / self.batch * side.replicas
        lengths, weights = self.lengths.values[::-1], self.lengths.weights[::-1]
        longest = self.lengths.of_maximum(self.batch).mean
        left = np.cumsum(weights[::-1])[::-1] * running
        latencies = self.engine.latency_s(np.maximum(left, 1 / side.replicas), side.degree)
        ends_s = float(latencies @ np.diff(np.minimum(lengths, longest), prepend=0.0))
        # Measurements of throughput hold for a full engine: no faster than that.
        return max(side.step_s, full_s + ends_s)


def _fastest(sides: Iterator[Side]) -> Side | None:
    return min(sides, key=lambda side: (side.step_s, side.gpus), default=None)


def _least(table: CostTable, name: str) -> str:
    needs, degree = min((table.gpu_bytes(*choice), choice[1]) for choice in table.choices())
    return f"{name} needs {needs:.4g} bytes on each of {degree} GPUs at least"
