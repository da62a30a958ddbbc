"""Measured costs of one side of a loop: seconds and memory of a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import PlanError

__all__ = ["CostTable"]

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
        PlanError: no choice, or a number is not positive.

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
        if not table or not all(min(b, m) >= 1 and s > 0 for (b, m), s in table.items()):
            raise PlanError(
                "sample_s needs positive seconds by (micro_batch, degree), both at least 1; a "
                f"callable needs micro_batches and degrees. Got {table!r:.80}"
            )
        if self.weight_bytes < 0 or self.sample_bytes < 0:
            raise PlanError(f"bytes are not negative; got {self.weight_bytes}, {self.sample_bytes}")
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
