"""A small mixture of experts learns in float8 as it does in bfloat16, and with tiny gradients too.

The band is `seed_band`: half of what other initial weights move the curve of the bfloat16 run,
about 0.04 nats. Sums of other processors move these curves by less than bfloat16 against float32
does, 0.01.
"""

import functools
import math
from dataclasses import replace

import pytest

from benchmarks.fp8_parts.moe import Sizes
from benchmarks.fp8_parts.training import (
    FlooredQuantizer,
    Run,
    distance,
    seed_band,
    train,
    windows,
)
from primeblocks.fp8 import Recipe, Tile

SIZES = Sizes(layers=1, hidden=32, vocabulary=8, experts=4, rows=8, length=16)
DEFAULT = Recipe(activations=Tile(1, 32), weights=Tile(32, 32))
ALL = replace(DEFAULT, wgrad="float8")  # All three products in float8.


@functools.cache
def curve(recipe, *, divisor=1.0, seed=0):
    run = Run(recipe, divisor, seed, steps=50, rate=1e-2, sizes=SIZES)
    return train(run)


@functools.cache
def band():
    return seed_band([curve(None, seed=seed) for seed in range(4)])


def test_bfloat16_learns_and_seeds_differ():
    first, *_, last = windows(curve(None))
    assert first > math.log(SIZES.vocabulary) - 0.1
    assert SIZES.entropy < last < first - 1
    assert 0.01 < band() < 0.1


@pytest.mark.parametrize(
    "recipe",
    [DEFAULT, ALL, replace(DEFAULT, saved="float8"), Recipe.mxfp8(wgrad="float8")],
    ids=["default", "float8 wgrad", "float8 saved", "mxfp8"],
)
def test_float8_learns_within_the_band(recipe):
    assert distance(curve(recipe), curve(None)) < band()


def test_a_power_of_two_in_the_loss_changes_no_bit():
    assert curve(ALL, divisor=2.0**23) == curve(ALL)


def test_a_loss_divided_by_ten_million_is_within_the_band():
    # 1e7 is no power of two: each gradient is rounded once more, to float32 and to another code.
    assert distance(curve(ALL, divisor=1e7), curve(None)) < band()


def test_with_a_floor_the_layers_learn_nothing():
    floored = curve(replace(ALL, quantizer=FlooredQuantizer()), divisor=1e7)
    assert windows(floored)[-1] > windows(curve(ALL, divisor=1e7))[-1] + 20 * band()
    assert windows(floored)[-1] > math.log(SIZES.vocabulary) - 0.1
