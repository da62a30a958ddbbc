"""The division of GPUs between trainer and engine: LlamaRL's search over measured costs.

The search assumes that all samples have equal lengths. `simulate` also models long-tailed lengths
and the maximum staleness.

Source: arXiv:2505.24034, section 7. The derivation is in `docs/planning_evidence.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..errors import PlanError

__all__ = ["CostTable", "Side", "SplitPlan", "plan_split"]


@dataclass(frozen=True)
class CostTable:
    """Seconds per sample of a trainer or an engine, by micro-batch and model-parallel degree.

    Args:
        sample_s: measured seconds per sample by `(micro_batch, degree)`, for one replica of
            `degree` GPUs. For an engine, `micro_batch` is the number of samples that run at a time.
        weight_bytes: bytes of one replica's weights. For a trainer, include gradients and optimizer
            state.
        sample_bytes: bytes of activations or KV cache for each sample of a micro-batch, on one
            replica.

    Raises:
        PlanError: `sample_s` is empty, or a number is out of range.
    """

    sample_s: Mapping[tuple[int, int], float]
    weight_bytes: float
    sample_bytes: float = 0.0

    def __post_init__(self) -> None:
        choices = self.sample_s.items()
        sound = all(min(b, m) >= 1 and 0 < s < math.inf for (b, m), s in choices)
        sizes = self.weight_bytes, self.sample_bytes
        if not choices or not sound or not all(0 <= size < math.inf for size in sizes):
            raise PlanError(
                "sample_s needs positive, finite seconds by (micro_batch, degree), both at least "
                f"1, and bytes of 0 or more; got {dict(self.sample_s)!r:.80} and {sizes}."
            )

    def gpu_bytes(self, micro_batch: int, degree: int) -> float:
        """Return the bytes of memory that each GPU of a replica needs."""
        return (self.weight_bytes + micro_batch * self.sample_bytes) / degree

    def batch_s(self, micro_batch: float, degree: int) -> float:
        """Return the seconds of a micro-batch, interpolated between measured sizes.

        The result is at least the seconds of the smallest measured size.

        Raises:
            PlanError: `sample_s` has no entry for the degree.
        """
        table = sorted((b, b * s) for (b, m), s in self.sample_s.items() if m == degree)
        if not table:
            raise PlanError(
                f"degree {degree!r} was not measured. Pass one of the degrees of sample_s: "
                f"{sorted({m for _, m in self.sample_s})}."
            )
        sizes, seconds = zip(*table, strict=True)
        return float(np.interp(micro_batch, sizes, seconds))


@dataclass(frozen=True)
class Side:
    """A trainer or an engine: replicas of `degree` GPUs with `micro_batch` samples at a time.

    `step_s` is the time of a batch in seconds, without waiting. `gpu_bytes` is the memory that each
    GPU needs.
    """

    degree: int
    replicas: int
    micro_batch: int
    step_s: float
    gpu_bytes: float

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.degree * self.replicas


@dataclass(frozen=True)
class SplitPlan:
    """GPUs for the trainer and for the engine, and the resulting step times.

    Args:
        publish_s: seconds that the trainer waits for the engine. `async_s` and `together_s` include
            `publish_s`, but `bound_s` does not.
        together_s: seconds of a synchronous step, in which trainer and engine use all GPUs in turn.
            The value is infinite if trainer and engine do not fit on the same GPUs.
        bound_s: a lower bound of the seconds of an asynchronous step. It is the fewest GPU-seconds
            for training on a batch, plus the fewest for generating the batch, divided by the number
            of GPUs.
    """

    trainer: Side
    engine: Side
    publish_s: float
    together_s: float
    bound_s: float

    @property
    def theta(self) -> float:
        """The trainer's share of the GPUs in use."""
        return self.trainer.gpus / (self.trainer.gpus + self.engine.gpus)

    @property
    def async_s(self) -> float:
        """Seconds of an asynchronous step: the larger of the trainer's and the engine's seconds."""
        return max(self.trainer.step_s + self.publish_s, self.engine.step_s)

    @property
    def gain(self) -> float:
        """The speed-up over a synchronous step, if all samples had equal lengths."""
        return self.together_s / self.async_s

    def table(self) -> str:
        """Return one line each for trainer and engine, then the seconds of each kind of step."""
        lines = ["side      GPUs  degree  replicas  micro-batch  GB a GPU  s a batch"]
        for name, side in (("trainer", self.trainer), ("engine", self.engine)):
            lines.append(
                f"{name:<8}{side.gpus:>6}{side.degree:>8}{side.replicas:>10}{side.micro_batch:>13}"
                f"{side.gpu_bytes / 1e9:>10.1f}{side.step_s:>11.4g}"
            )
        return "\n".join(
            [
                *lines,
                "",
                f"asynchronous                  {self.async_s:>10.4g} s a step",
                f"synchronous, all GPUs in turn {self.together_s:>10.4g} s a step",
                f"bound: fractions of GPUs      {self.bound_s:>10.4g} s a step",
                f"theta {self.theta:.3f}, gain {self.gain:.2f} x",
            ]
        )


def plan_split(
    trainer: CostTable,
    engine: CostTable,
    *,
    gpus: int,
    batch_size: int,
    memory_bytes: float,
    max_off_policy_steps: int = 1,
    publish_s: float = 0.0,
) -> SplitPlan:
    """Choose GPUs, model-parallel degrees and micro-batches of trainer and engine. Pure.

    The search tries all choices. In the asynchronous loop, trainer and engine have separate GPUs,
    degrees and memory limits. In the synchronous loop, all GPUs generate and train in turn, so
    trainer and engine share one degree and one memory limit.

    Args:
        gpus: the total number of GPUs.
        batch_size: the number of samples in a step.
        memory_bytes: bytes of memory of each GPU.
        max_off_policy_steps: the maximum number of batches that the engine generates ahead.
        publish_s: seconds that the trainer waits for the engine after each step.

    Raises:
        PlanError: a number is out of range, or no choice fits in memory. If no choice fits, the
            message contains the minimum memory of trainer and engine.
    """
    sizes = memory_bytes > 0 and publish_s >= 0 and math.isfinite(memory_bytes + publish_s)
    if not sizes or min(batch_size, max_off_policy_steps) < 1 or gpus < 2:
        raise PlanError(
            "batch_size and max_off_policy_steps must be at least 1, gpus at least 2, memory_bytes "
            f"positive and publish_s 0 or more; got {batch_size}, {max_off_policy_steps}, {gpus}, "
            f"{memory_bytes} and {publish_s}."
        )

    def train_s(micro_batch: int, degree: int, replicas: int) -> float:
        # A replica gets whole samples.
        full, rest = divmod(math.ceil(batch_size / replicas), micro_batch)
        step_s = full * trainer.batch_s(micro_batch, degree)
        return step_s + trainer.batch_s(rest, degree) if rest else step_s

    def generate_s(most: int, micro_batch: int, degree: int, replicas: int) -> float:
        # There are `most` samples at a time.
        used, each = min(replicas, most), min(micro_batch, max(1.0, most / replicas))
        return batch_size / used * engine.batch_s(each, degree) / each

    def fitting(
        table: CostTable, share: int, step_s: Callable[[int, int, int], float]
    ) -> Iterator[Side]:
        for micro_batch, degree in table.sample_s:
            gpu_bytes, replicas = table.gpu_bytes(micro_batch, degree), share // degree
            if replicas and gpu_bytes <= memory_bytes:
                batch_s = step_s(micro_batch, degree, replicas)
                yield Side(degree, replicas, micro_batch, batch_s, gpu_bytes)

    def preferred(side: Side) -> tuple[float, int]:
        return side.step_s, side.gpus  # If equally fast, the side with the fewest GPUs.

    ahead_s = partial(generate_s, max_off_policy_steps * batch_size)
    ways = []
    for share in range(1, gpus):
        train = min(fitting(trainer, share, train_s), key=preferred, default=None)
        generate = min(fitting(engine, gpus - share, ahead_s), key=preferred, default=None)
        if train is not None and generate is not None:
            slower_s = max(train.step_s + publish_s, generate.step_s)
            ways.append((slower_s, train.step_s + generate.step_s, train, generate))
    if not ways:
        least = [
            min((table.gpu_bytes(b, m), m) for b, m in table.sample_s)
            for table in (trainer, engine)
        ]
        needs = [f"needs at least {size:.4g} bytes on each of {m} GPUs" for size, m in least]
        raise PlanError(
            f"no division of {gpus} GPUs of {memory_bytes:.4g} bytes fits: the trainer {needs[0]}, "
            f"the engine {needs[1]}. Add GPUs, higher degrees or smaller micro-batches."
        )
    *_, train, generate = min(ways, key=lambda way: way[:2])
    together_s = min(
        (
            one.step_s + other.step_s + publish_s
            for one in fitting(trainer, gpus, train_s)
            for other in fitting(engine, gpus, partial(generate_s, batch_size))
            if one.degree == other.degree and one.gpu_bytes + other.gpu_bytes <= memory_bytes
        ),
        default=math.inf,
    )
    sample_s = sum(  # GPU-seconds of both sides, each at its best.
        min(m * s for (b, m), s in table.sample_s.items() if table.gpu_bytes(b, m) <= memory_bytes)
        for table in (trainer, engine)
    )
    return SplitPlan(train, generate, publish_s, together_s, batch_size / gpus * sample_s)
