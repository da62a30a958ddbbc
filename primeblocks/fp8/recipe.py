"""The recipe of float8 products: what is rounded, how, and which engine multiplies."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..errors import PlanError, UnsupportedError, UsageError
from .formats import Tile, check_tile
from .quantize import Quantized
from .reference import ReferenceGemm

__all__ = ["Gemm", "Recipe", "check_recipe"]


class Gemm(Protocol):
    """An engine: `a @ b.T` of two quantized matrices, float32. Hashable, as part of a Recipe."""

    def __call__(self, a: Quantized, b: Quantized) -> Tensor: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Recipe:
    """A hashable value: equal recipes round alike, and `fingerprint` says so across processes.

    Args:
        activations: tile of activations and of their gradients.
        weights: tile of weights. Where weights are sharded by rows, shards of a multiple of
            `weights.rows` have the same tiles as the whole.
        scale: how scales are kept; power-of-two scales are not built.
        wgrad: the dtype in which gradients of weights are multiplied; they are never float8.
        gemm: the engine. It is passed in, never found: what happens to be installed does not
            alter anyone's numbers.

    Raises:
        UsageError: a tile that is no `Tile`, or an engine that cannot be called.
        PlanError: the tiles do not share their inner side, in both directions.
        UnsupportedError: another scale or wgrad than those above.
    """

    activations: Tile = field(default=Tile(1, 128))
    weights: Tile = field(default=Tile(128, 128))
    scale: str = "float32"
    wgrad: str = "float32"
    gemm: Gemm = field(default_factory=ReferenceGemm)

    def __post_init__(self) -> None:
        check_tile("activations", self.activations)
        check_tile("weights", self.weights)
        if not callable(self.gemm) or isinstance(self.gemm, type):
            raise UsageError(f"gemm must be an engine, such as ReferenceGemm(); got {self.gemm!r}")
        if self.activations.columns != self.weights.columns:
            raise PlanError(
                f"activations {self.activations} and weights {self.weights} need the same number "
                "of columns: they are multiplied along them"
            )
        if self.scale != "float32":
            raise UnsupportedError(f'scale={self.scale!r} is not built; use scale="float32"')
        if self.wgrad not in ("float32", "bfloat16"):
            raise UnsupportedError(f'wgrad is "float32" or "bfloat16"; got {self.wgrad!r}')

    @property
    def gradients(self) -> Tile:
        """Tile of the gradient of an output: its inner side is the weights' rows."""
        return Tile(self.activations.rows, self.weights.rows)

    @property
    def wgrad_dtype(self) -> torch.dtype:
        return torch.float32 if self.wgrad == "float32" else torch.bfloat16

    def fingerprint(self) -> str:
        """Sixteen hex digits of everything that decides codes and scales; not the engine. Pure."""
        text = f"e4m3 {self.activations} {self.weights} {self.scale} x*(1/scale)"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_recipe(recipe: object) -> None:
    """Refuse what is no recipe. Local.

    Raises:
        UsageError: with what was passed.
    """
    if not isinstance(recipe, Recipe):
        raise UsageError(f"recipe must be a Recipe, such as Recipe(); got {recipe!r:.60}")
