"""The division of GPUs between trainer and engine, and whether a division helps at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PlanError
from .distribution import Distribution, constant
from .lag import predict_lag
from .splitplan import Side, SplitPlan

__all__ = ["CostTable", "plan_split"]

_FREE = 1 << 40  # requests at a time: no limit

Seconds = Mapping[tuple[int, int], float] | Callable[[int, int], float]


@dataclass(frozen=True)
class CostTable:
    """Seconds a sample of a trainer or an engine, by micro-batch and model-parallel degree.

    Args:
        sample_s: seconds a sample of one replica of `degree` GPUs, by `(micro_batch, degree)`:
            measurements, or a callable. The micro-batch of an engine is the number of samples that
            it runs at a time.
        weight_bytes: of one replica: weights; gradients and optimizer state, too, of a trainer.
        sample_bytes: of one sample of a micro-batch on one replica: activations, or KV cache.
        micro_batches: the choices, where `sample_s` is a callable.
        degrees: the choices, where `sample_s` is a callable.

    Raises:
        PlanError: no choice, or a number is not positive and finite.

    Source: the functions eta of arXiv:2505.24034, section 7.
    """

    sample_s: Seconds
    weight_bytes: float
    sample_bytes: float = 0.0
    micro_batches: Sequence[int] = ()
    degrees: Sequence[int] = ()
    _table: Mapping[tuple[int, int], float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if callable(self.sample_s):
            pairs = [(b, m) for m in self.degrees for b in self.micro_batches]
            table = {pair: float(self.sample_s(*pair)) for pair in pairs}
        else:
            table = {pair: float(seconds) for pair, seconds in self.sample_s.items()}
        if not table or not all(min(b, m) >= 1 and 0 < s < math.inf for (b, m), s in table.items()):
            raise PlanError(
                "sample_s needs positive seconds by (micro_batch, degree), both at least 1; a "
                f"callable needs micro_batches and degrees. Got {table!r:.80}"
            )
        if not (0 <= self.weight_bytes < math.inf and 0 <= self.sample_bytes < math.inf):
            raise PlanError(
                f"bytes must be 0 or more, and finite; got {self.weight_bytes}, {self.sample_bytes}"
            )
        object.__setattr__(self, "_table", table)

    def choices(self) -> Mapping[tuple[int, int], float]:
        """Return the seconds a sample by `(micro_batch, degree)`. Pure."""
        return self._table

    def gpu_bytes(self, micro_batch: int, degree: int) -> float:
        """Return the memory that a GPU of a replica needs. Pure."""
        return (self.weight_bytes + micro_batch * self.sample_bytes) / degree

    def latency_s(self, running: ArrayLike, degree: int) -> NDArray[np.float64]:
        """Return the seconds that a sample takes where so many share a replica. Pure.

        By Little's law the micro-batch times the seconds a sample, interpolated. With fewer than
        were measured it is no faster; with more, the throughput stays.
        """
        table = sorted((b, b * s) for (b, m), s in self._table.items() if m == degree)
        sizes, seconds = np.array(table, np.float64).T
        many = np.asarray(running, np.float64)
        beyond = np.maximum(1.0, many / sizes[-1])
        return np.asarray(np.interp(many, sizes, seconds) * beyond)


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

    Source: arXiv:2505.24034, section 7. The derivation is in `docs/planning.md`.
    """
    _check(gpus, batch_size, samples, max_off_policy_steps, trainer_gpus)
    if not (0 < memory_bytes < math.inf and 0 <= publish_s < math.inf and worth > 0):
        raise PlanError(
            "memory_bytes and worth must be positive, publish_s 0 or more; got "
            f"{memory_bytes}, {worth} and {publish_s}"
        )
    if swap_s is not None and not 0 <= swap_s < math.inf:
        raise PlanError(f"swap_s must be 0 or more; got {swap_s}")
    task = _Task(
        trainer, engine, gpus, batch_size * samples, memory_bytes, publish_s, swap_s,
        constant(1.0) if lengths is None else lengths.scaled(1 / lengths.mean),
    )  # fmt: skip
    # While the last sample of a group is made, the others' places in the engine are empty.
    filled = samples * task.lengths.mean / task.lengths.of_maximum(samples).mean
    train, generate = task.apart(trainer_gpus, max_off_policy_steps * batch_size * filled)
    together_s, no_tail_s, free_s = task.together()
    engine_gpus = gpus - (train.gpus if trainer_gpus is None else trainer_gpus)
    in_turn = (task.ends_s(side) for side in task.engines(engine_gpus, float(task.batch)))
    running = generate.running / generate.replicas
    lag, tail = (
        predict_lag(
            task.lengths.scaled(float(engine.latency_s(running, generate.degree))),
            batch_size=batch_size,
            max_off_policy_steps=max_off_policy_steps,
            max_in_flight=most,
            train_s=train.step_s,
            publish_s=publish_s,
            samples=samples,
        )
        for most in (max(1, round(generate.running / filled)), _FREE)
    )
    return SplitPlan(
        gpus=gpus,
        trainer=train,
        engine=generate,
        tail_s=tail.step_s,
        together_s=together_s,
        apart_s=min(in_turn) + train.step_s + publish_s,
        no_tail_s=no_tail_s,
        free_s=free_s,
        bound_s=task.bound_s(),
        publish_s=publish_s,
        lag=lag.group,
        worth=worth,
    )


def _check(gpus: int, batch: int, samples: int, bound: int, trainer_gpus: int | None) -> None:
    if min(batch, samples, bound) < 1:
        raise PlanError(
            "batch_size, samples and max_off_policy_steps must be at least 1; got "
            f"{batch}, {samples} and {bound}. Without a lag there is nothing to divide."
        )
    if gpus < 2 or (trainer_gpus is not None and not 1 <= trainer_gpus < gpus):
        raise PlanError(
            f"trainer and engine need a GPU each; got gpus={gpus}, trainer_gpus={trainer_gpus}. "
            "On one GPU they take turns: a synchronous loop."
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

    def trainers(self, gpus: int) -> Iterator[Side]:
        """All choices for the trainer that fit: samples are not divided among replicas."""
        for micro_batch, degree, replicas in self._fitting(self.trainer, gpus):
            full, rest = divmod(math.ceil(self.batch / replicas), micro_batch)
            full_s, rest_s = self.trainer.latency_s([micro_batch, rest], degree).tolist()
            step_s = full * full_s + (rest_s if rest else 0.0)
            running = min(micro_batch * replicas, self.batch)
            yield self._side(self.trainer, micro_batch, degree, replicas, running, step_s)

    def engines(self, gpus: int, most: float) -> Iterator[Side]:
        """All choices for the engine that fit, where there are `most` samples at a time."""
        for micro_batch, degree, replicas in self._fitting(self.engine, gpus):
            used = min(float(replicas), max(1.0, most))  # A sample is on one of them.
            each = min(float(micro_batch), max(1.0, most / replicas))
            step_s = self.batch / used * float(self.engine.latency_s(each, degree)) / each
            yield self._side(self.engine, micro_batch, degree, replicas, each * used, step_s)

    def _fitting(self, table: CostTable, gpus: int) -> Iterator[tuple[int, int, int]]:
        for micro_batch, degree in table.choices():
            if degree <= gpus and table.gpu_bytes(micro_batch, degree) <= self.memory_bytes:
                yield micro_batch, degree, gpus // degree

    @staticmethod
    def _side(
        table: CostTable,
        micro_batch: int,
        degree: int,
        replicas: int,
        running: float,
        step_s: float,
    ) -> Side:
        return Side(
            gpus=replicas * degree,
            degree=degree,
            micro_batch=micro_batch,
            running=running,
            step_s=step_s,
            gpu_bytes=table.gpu_bytes(micro_batch, degree),
        )

    def apart(self, trainer_gpus: int | None, ahead: float) -> tuple[Side, Side]:
        """The fastest asynchronous choice; of several, that with the fewest GPUs in use."""
        shares = range(1, self.gpus) if trainer_gpus is None else [trainer_gpus]
        best: tuple[tuple[float, float], Side, Side] | None = None
        for share in shares:
            trains = _fastest(self.trainers(share))
            generates = _fastest(self.engines(self.gpus - share, ahead))
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
        trains = list(self.trainers(self.gpus))
        generates = [
            (side, self.ends_s(side)) for side in self.engines(self.gpus, float(self.batch))
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
