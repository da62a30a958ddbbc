"""Training in float8 beside training in bfloat16, with small gradients too.

    python -m benchmarks.fp8_parts.training --json benchmarks/results/fp8_training.json

A mixture of experts (`moe`) is trained from one seed on the same text. The loss may be divided
before backward, as losses are that are normalised by a global count of tokens; the gradients are
multiplied by the same number before the optimizer steps. So in exact arithmetic nothing changes,
and what does change is what small gradients lose in float8. Four minutes on one core of a CPU.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from primeblocks import fp8
from primeblocks.fp8 import Quantized, Recipe, Tile

from ..harness import main
from .moe import QUANTIZED, MixtureModel, Sizes, round_products

__all__ = [
    "FLOORED",
    "RUNS",
    "FlooredQuantizer",
    "Run",
    "distance",
    "seed_band",
    "train",
    "windows",
]


@dataclass(frozen=True)
class FlooredQuantizer:
    """`fp8.quantize` with a floor, as others have it: of scales, or of a tile's largest value.

    prime-rl's casts have `scale = max(amax / 448, 1e-4)`, DeepGEMM's reference
    `max(amax, 1e-4) / 448`. Above its floor the codes are those of the definition.
    """

    floor: float = 1e-4
    of: Literal["scale", "amax"] = "scale"

    def __call__(self, x: Tensor, tile: Tile, **how: Any) -> Quantized:
        exact = fp8.quantize(x, tile, **how)
        floor = self.floor if self.of == "scale" else self.floor / 448
        scales = exact.scales.clamp(min=floor)
        ones = torch.ones(x.shape).to(torch.float8_e4m3fn)
        factors = Quantized(ones, scales.reciprocal(), tile).dequantize()
        codes = (x.detach().float() * factors).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Quantized(codes, scales, tile)


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        recipe: of float8 products; None for bfloat16.
        divisor: of the loss before backward, and factor of the gradients after it.
        seed: of the weights; the text is the same in all runs.
    """

    recipe: Recipe | None
    divisor: float = 1.0
    seed: int = 0
    steps: int = 200
    rate: float = 3e-3
    sizes: Sizes = field(default=Sizes())


def train(run: Run) -> list[float]:
    """Return the loss of every step, in nats a token, before it is divided.

    Text is new in every step, so no loss is of text that was seen.
    """
    model = MixtureModel(run.sizes, seed=run.seed)
    # Without an eps of any size AdamW's step does not depend on the gradients' scale.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.rate, betas=(0.9, 0.95), eps=1e-15, weight_decay=0
    )
    if run.recipe is None:
        round_products(model)
    else:
        fp8.convert(model, run.recipe, only=QUANTIZED)
        fp8.WeightCache(model, optimizer)
    text, losses = torch.Generator().manual_seed(1000), []
    for _ in range(run.steps):
        loss = model.loss(run.sizes.batch(text))
        (loss / run.divisor).backward()
        for parameter in model.parameters():
            parameter.grad *= run.divisor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def windows(losses: list[float]) -> list[float]:
    """Return the means of the tenths of a curve."""
    size = len(losses) // 10
    return [statistics.mean(losses[i : i + size]) for i in range(0, len(losses), size)]


def distance(a: list[float], b: list[float]) -> float:
    """Return the mean distance of two curves, window by window, in nats a token."""
    return statistics.mean(abs(x - y) for x, y in zip(windows(a), windows(b), strict=True))


def seed_band(curves: list[list[float]]) -> float:
    """Return half of the mean distance between curves that differ by their seed.

    Rounding that does no harm moves a curve less than other initial weights do.
    """
    return statistics.mean(distance(*pair) for pair in itertools.combinations(curves, 2)) / 2


# As prime-rl multiplies: all three products of a layer in float8.
ALL = Recipe(wgrad="float8")
FLOORED = FlooredQuantizer()
BY_TOKENS = 1e7 / (Sizes().rows * Sizes().length)

RUNS = {
    "bfloat16": Run(None),
    "float8": Run(ALL),
    "float8_1e7": Run(ALL, 1e7),
    "floored_1e7": Run(replace(ALL, quantizer=FLOORED), 1e7),
}
"""The runs of the figure in the docs: one seed, loss undivided or divided by 1e7."""

OTHERS = {
    # A loss that is summed, not averaged, over the tokens of the batch before it is divided.
    "floored_sum_1e7": Run(replace(ALL, quantizer=FLOORED), BY_TOKENS),
    "floored": Run(replace(ALL, quantizer=FLOORED)),
    "floored_bfloat16_wgrad_1e7": Run(Recipe(quantizer=FLOORED), 1e7),
    "floored_amax_1e7": Run(replace(ALL, quantizer=FlooredQuantizer(of="amax")), 1e7),
    "floored_amax_sum_1e7": Run(replace(ALL, quantizer=FlooredQuantizer(of="amax")), BY_TOKENS),
    "float8_bfloat16_wgrad_1e7": Run(Recipe(), 1e7),
    "mxfp8_1e7": Run(Recipe.mxfp8(wgrad="float8"), 1e7),
}


def measure() -> dict[str, tuple[float, str, str]]:
    """Train; the figures stand only if float8 is within the band and the floor is not."""
    torch.set_num_threads(1)
    curves = {name: train(run) for name, run in (RUNS | OTHERS).items()}
    plain = curves["bfloat16"]
    band = seed_band([plain, *(train(Run(None, seed=seed)) for seed in (1, 2, 3))])
    for name in ("float8", "float8_1e7", "float8_bfloat16_wgrad_1e7", "mxfp8_1e7"):
        off = distance(curves[name], plain)
        assert off < band, f"{name} is {off:.3f} nats off bfloat16; the band is {band:.3f}"
    floored, learned = windows(curves["floored_1e7"])[-1], windows(plain)[-1]
    assert floored > learned + 1, f"with a floor {floored:.3f}, bfloat16 {learned:.3f}"

    figures = {"fp8.training.seed_band": (band, "nats/token", "")}
    for name, losses in curves.items():
        of_run = f"fp8.training.{name}"
        figures[f"{of_run}.distance"] = distance(losses, plain), "nats/token", "bfloat16"
        for step, loss in zip(range(20, 201, 20), windows(losses), strict=True):
            if name in OTHERS and step < 200:
                continue
            figures[f"{of_run}.loss.{step:03}"] = loss, "nats/token", ""
    return figures


if __name__ == "__main__":
    main(measure)
