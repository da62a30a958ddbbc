"""Distributions of lengths and durations, each given by its quantile function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["Distribution", "constant", "empirical", "lognormal"]

# Midpoints of [0, 1] in v, where u = 1 - v**3. Half of them are in the upper eighth, and the last
# is 2e-12 from the end, so that the mean of a heavy tail is right.
_V = (np.arange(4096) + 0.5) / 4096
_LEVELS = 1 - _V**3
_WEIGHTS = 3 * _V**2 / np.sum(3 * _V**2)


@dataclass(frozen=True, eq=False)
class Distribution:
    """A distribution of positive numbers: tokens, or seconds.

    Args:
        name: the name in tables.
        quantile: maps levels in (0, 1) to values, both float64 arrays. It must not decrease.
    """

    name: str
    quantile: Callable[[NDArray[np.float64]], NDArray[np.float64]]

    def __repr__(self) -> str:
        return f"<Distribution {self.name}: mean {self.mean:.4g}>"

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Return `count` independent values. Local."""
        return self.quantile(generator.random(count))

    @cached_property
    def mean(self) -> float:
        return float(self.quantile(_LEVELS) @ _WEIGHTS)


def constant(value: float) -> Distribution:
    """Return the distribution of one value. Pure."""
    _positive(value=value)
    return Distribution(f"constant {value:.4g}", lambda u: np.full(np.shape(u), float(value)))


def lognormal(*, mean: float, sigma: float, maximum: float | None = None) -> Distribution:
    """Return a lognormal distribution, cut off at `maximum` as answers are. Pure.

    Args:
        mean: the mean before the cut. The result has a smaller mean.
        sigma: standard deviation of the logarithm. Lengths of answers usually have 0.9 to 1.2.
        maximum: larger values become this value.
    """
    _positive(mean=mean, maximum=maximum)
    if sigma < 0:
        raise UsageError(f"sigma must not be negative; got {sigma}.")
    centre, most = np.log(mean) - sigma**2 / 2, np.inf if maximum is None else maximum

    def quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
        values = np.exp(centre + sigma * torch.special.ndtri(torch.as_tensor(u)).numpy())
        return np.minimum(values, most)

    return Distribution(f"lognormal sigma {sigma:g}", quantile)


def empirical(values: Sequence[float]) -> Distribution:
    """Return the distribution of measured values, all equally likely. Pure."""
    ordered = np.sort(np.asarray(values, np.float64))
    if ordered.ndim != 1 or not ordered.size or not ordered[0] > 0 or not np.isfinite(ordered[-1]):
        raise UsageError(f"values must be positive, finite and at least one; got {values!r:.60}.")

    def quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
        return ordered[np.minimum((np.asarray(u) * len(ordered)).astype(int), len(ordered) - 1)]

    return Distribution(f"{len(ordered)} measured values", quantile)


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} must be positive and finite; got {value}.")
