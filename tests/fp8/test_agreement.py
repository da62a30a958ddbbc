"""Trainer and engine with one recipe agree more than with the same recipe from other weights.

A model is trained for a while, so that its weights are float32 masters. The engine, simulated on a
CPU, holds float8 weights that are dequantized once, from what was exported in bfloat16, and
multiplies in another order than the trainer: in plain float32 matrix products. It samples; the
trainer, with `ReferenceGemm`, says how probable those tokens are.
"""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from benchmarks.fp8_parts.moe import QUANTIZED, MixtureModel, Sizes
from primeblocks import fp8
from primeblocks.fp8 import Recipe, Tile
from primeblocks.fp8.reference import ReferenceGemm, runs
from primeblocks.replay import measure_mismatch

SIZES = Sizes(layers=2, hidden=64, vocabulary=16, experts=4, rows=8, length=32)
RECIPE = Recipe(activations=Tile(1, 32), weights=Tile(32, 32))


@dataclass(frozen=True)
class Bfloat16Results:
    """A trainer's engine whose results are bfloat16, as DeepGEMM's are."""

    k_major: ClassVar[bool] = False

    def __call__(self, a, b):
        return ReferenceGemm()(a, b).bfloat16()

    def grouped(self, a, b, offsets):
        return ReferenceGemm().grouped(a, b, offsets).bfloat16()


@dataclass(frozen=True)
class EngineGemm:
    """An engine's products, of dequantized codes in float32; its results are bfloat16."""

    k_major: ClassVar[bool] = False

    def __call__(self, a, b):
        return (a.dequantize() @ b.dequantize().t()).bfloat16()

    def grouped(self, a, b, offsets):
        matrices, rows = b.dequantize(), a.dequantize()
        parts = [rows[part] @ matrices[e].t() for e, part in enumerate(runs(offsets))]
        return torch.cat(parts).bfloat16()


@pytest.fixture(scope="module")
def master():
    model = MixtureModel(SIZES, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)
    text = torch.Generator().manual_seed(1)
    for _ in range(60):
        model.loss(SIZES.batch(text)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits(master, recipe, tokens, *, exported=False):
    """Log-probabilities; what is not quantized is bfloat16 on both sides, as FSDP2 gathers it."""
    model = copy.deepcopy(master)
    names = fp8.convert(model, recipe, only=QUANTIZED)
    for name, parameter in model.named_parameters():
        if exported or not name.startswith(names):
            parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        return model(tokens).log_softmax(-1).flatten(0, 1)


def mismatch(master, *, trainer, engine):
    tokens = replace(SIZES, rows=16).batch(torch.Generator().manual_seed(2))
    rollout = logits(master, engine, tokens, exported=True)
    draw = torch.Generator().manual_seed(3)
    sampled = torch.multinomial(rollout.exp(), 1, generator=draw)
    own = logits(master, trainer, tokens)
    return measure_mismatch(
        trainer_logprobs=own.gather(-1, sampled)[:, 0],
        rollout_logprobs=rollout.gather(-1, sampled)[:, 0],
    )


# A trainer and an engine as they are: equal operands and results, sums in another order.
TRAINER = replace(RECIPE, gemm=Bfloat16Results())
ENGINE = replace(RECIPE, gemm=EngineGemm())


@pytest.fixture(scope="module")
def agreed(master):
    return mismatch(master, trainer=TRAINER, engine=ENGINE)


def test_one_recipe_and_one_engine_agree_to_the_bit(master):
    # The trainer quantizes the bfloat16 rounding of its master weights, so what was exported.
    tokens = SIZES.batch(torch.Generator().manual_seed(2))
    exported = logits(master, RECIPE, tokens, exported=True)
    assert torch.equal(logits(master, RECIPE, tokens), exported)
    assert mismatch(master, trainer=RECIPE, engine=RECIPE).k3 == 0


@pytest.mark.parametrize(
    "other",
    [{"source": "float32"}, {"scale": "ue8m0"}, {"weights": Tile(64, 32)}],
    ids=["float32 master", "ue8m0 on one side", "other tiles on one side"],
)
def test_recipes_that_differ_disagree_far_more(master, agreed, other):
    # A weight near the middle of two codes gets one from the master and the other from its
    # bfloat16 rounding: one in fifty, which moves matrices by 1.2 %, seven times what bfloat16
    # did. Sums in another order differ in the last bit of float32, which bfloat16 results hide but
    # for one in thousands.
    trainer = replace(TRAINER, **other)
    apart = mismatch(master, trainer=trainer, engine=ENGINE)
    assert apart.k3 > 1e-4
    assert agreed.k3 < apart.k3 / 20
    assert trainer.fingerprint() != ENGINE.fingerprint()  # Seen before step 0.


def test_both_sides_may_change_the_recipe(master):
    other = {"scale": "ue8m0", "weights": Tile(64, 32)}
    both = mismatch(master, trainer=replace(TRAINER, **other), engine=replace(ENGINE, **other))
    apart = mismatch(master, trainer=TRAINER, engine=replace(ENGINE, **other))
    assert both.k3 < apart.k3 / 20


def test_results_in_another_dtype_are_no_matter_of_the_recipe(master, agreed):
    # Float32 results beside bfloat16 ones: other codes of activations, whatever the weights are.
    mixed = mismatch(master, trainer=RECIPE, engine=ENGINE)
    assert mixed.k3 > 20 * agreed.k3
    assert RECIPE.fingerprint() == ENGINE.fingerprint()
