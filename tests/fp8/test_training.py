"""A small mixture of experts learns in float8 as it does in bfloat16, and with tiny gradients too.

The band is `seed_band`: half of what other initial weights move the curve of the bfloat16 run,
about 0.04 nats. Sums of other processors move these curves by less than bfloat16 against float32
does, 0.01.
"""

import functools
import math

from benchmarks.fp8_parts.moe import Sizes
from benchmarks.fp8_parts.training import Run, distance, seed_band, train, windows
from primeblocks.fp8 import Recipe, Tile

SIZES = Sizes(layers=1, hidden=32, vocabulary=8, experts=4, rows=8, length=16)
# All three products in float8.
ALL = Recipe(activations=Tile(1, 32), weights=Tile(32, 32), wgrad="float8")


@functools.cache
def curve(recipe, *, divisor=1.0, seed=0):
    run = Run(recipe, divisor, seed, steps=50, rate=1e-2, sizes=SIZES)
    return train(run)


@functools.cache
def band():
    return seed_band([curve(None, seed=seed) for seed in range(4)])


def test_float8_learns_as_bfloat16_does_also_with_tiny_gradients():
    first, *_, last = windows(curve(None))
    assert first > math.log(SIZES.vocabulary) - 0.1
    assert SIZES.entropy < last < first - 1
    assert 0.01 < band() < 0.1
    for divisor in (1.0, 1e7):
        assert distance(curve(ALL, divisor=divisor), curve(None)) < band()
