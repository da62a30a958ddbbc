"""Codes, scales and products to the bit, as they were when the definition was written down."""

import json
from pathlib import Path

import pytest
import torch

from primeblocks.fp8 import Recipe, Tile
from primeblocks.fp8.reference import ReferenceGemm

# Made by the plain loops of test_quantize and test_matmul, in Python's floats and fractions.
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
RECIPES = {
    "float32": {},
    "division": {"quotient": "division"},
    "amax": {"quotient": "amax"},
    "ue8m0": {"scale": "ue8m0"},
}


def operand(rows, columns, start):
    """Numbers of many magnitudes that no generator's release changes: Lehmer's, 8 bits each."""
    state, values = start, []
    for index in range(rows * columns):
        state = state * 48271 % (2**31 - 1)
        values.append((state % 256 - 128) * 2.0 ** (-7 - 7 * (index // columns)))
    return torch.tensor(values).reshape(rows, columns)


def hexed(x):
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist()).hex()


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_has_changed(name):
    recipe = Recipe(activations=Tile(1, 16), weights=Tile(4, 16), source="float32", **RECIPES[name])
    a = recipe.quantize(operand(3, 40, start=145), recipe.activations)
    b = recipe.quantize(operand(5, 40, start=2), recipe.weights)
    product = ReferenceGemm()(a, b)
    found = [hexed(x) for x in (a.codes, a.scales, b.codes, b.scales, product)]
    assert found == GOLDEN[name]
