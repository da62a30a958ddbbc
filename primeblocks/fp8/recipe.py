"""The recipe of float8 products: what is rounded, how, and which engines do it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import PlanError, UnsupportedError, UsageError
from .quantize import (
    Nonfinite,
    Quantized,
    Quotient,
    Scale,
    Tile,
    check_choice,
    check_tile,
    quantize,
    swiglu,
)
from .reference import ReferenceGemm

__all__ = ["FusedQuantizer", "Gemm", "Quantizer", "Recipe", "check_recipe"]

Source = Literal["bfloat16", "float32"]
Wgrad = Literal["bfloat16", "float32", "float8"]
Saved = Literal["input", "float8"]


class Gemm(Protocol):
    """An engine that multiplies quantized matrices. Hashable, as part of a Recipe.

    Its results are float32 or bfloat16. `k_major` is True where it needs both operands contiguous
    along the inner dim: transposed weights are then copied once a version.
    """

    @property
    def k_major(self) -> bool: ...

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply `a @ b.T`."""
        ...

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Multiply each expert's rows of `a` by its matrix, `b[expert].T`.

        Args:
            a: `[tokens, in]`, sorted by expert.
            b: `[experts, out, in]`.
            offsets: int32 `[experts]`, where each expert's rows end. An engine of a GPU leaves it
                there.

        Returns:
            `[tokens, out]`; zeros past the last offset.
        """
        ...

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Multiply `a @ b.T` over each expert's part of the inner dim.

        Args:
            a: `[out, tokens]`, in tiles along the tokens, which an expert's end may cut.
            b: `[in, tokens]`.

        Returns:
            float32 `[experts, out, in]`; zeros for an expert without tokens.
        """
        ...

    def __hash__(self) -> int: ...


class Quantizer(Protocol):
    """An engine that quantizes, with the bits of `quantize`. Hashable, as part of a Recipe."""

    def __call__(
        self, x: Tensor, tile: Tile, *, scale: Scale, quotient: Quotient, nonfinite: Nonfinite
    ) -> Quantized: ...

    def __hash__(self) -> int: ...


@runtime_checkable
class FusedQuantizer(Protocol):
    """A quantizer that also takes two steps in one pass; the words are those of `Quantizer`."""

    def both(self, x: Tensor, tile: Tile, **how: Any) -> tuple[Quantized, Quantized]:
        """Quantize a matrix and its transpose, each in tiles along its own rows."""
        ...

    def swiglu(self, gate_up: Tensor, scores: Tensor | None, tile: Tile, **how: Any) -> Quantized:
        """Quantize `primeblocks.fp8.quantize.swiglu(gate_up, scores)`."""
        ...

    def swiglu_both(
        self, gate_up: Tensor, scores: Tensor | None, tile: Tile, **how: Any
    ) -> tuple[Quantized, Quantized]:
        """Quantize it and its transpose."""
        ...


@dataclass(frozen=True)
class Recipe:
    """A hashable value: equal recipes round alike, and `fingerprint` says so across processes.

    Args:
        activations: tile of activations and of their gradients.
        weights: tile of weights. Square ones serve the gradient of the input too, transposed;
            those of one row are quantized once more, along the other dim.
        scale: kind of scales; `"ue8m0"` rounds them up to powers of two.
        quotient: form of a scaled value; see `quantize`.
        source: what of a weight is quantized. `"bfloat16"`: its bfloat16 rounding, which is also
            what FSDP2 gathers and an engine loads; `"float32"`: the master weight, and a weight
            of less precision is refused.
        wgrad: the operands of weights' gradients; sums are float32 in any case.
        saved: what forward keeps of its input for the weight's gradient: the input, or codes, a
            byte a value.
        nonfinite: `"nan"` lets a value that is not finite pass into the results as NaN, as other
            products do; `"raise"` looks at every operand, for which a GPU waits.
        gemm: multiplies. It is passed in, never found: what happens to be installed does not
            alter anyone's numbers.
        quantizer: quantizes, to the same bits whoever it is; in fewer passes if it is a
            `FusedQuantizer`.

    Raises:
        UsageError: a tile that is no `Tile`, or an engine that cannot be called.
        PlanError: the tiles do not share their inner side, in both directions.
        UnsupportedError: another word than those above.
    """

    activations: Tile = field(default=Tile(1, 128))
    weights: Tile = field(default=Tile(128, 128))
    scale: Scale = "float32"
    quotient: Quotient = "reciprocal"
    source: Source = "bfloat16"
    wgrad: Wgrad = "bfloat16"
    saved: Saved = "input"
    nonfinite: Nonfinite = "nan"
    gemm: Gemm = field(default=ReferenceGemm())
    quantizer: Quantizer = field(default=quantize)

    def __post_init__(self) -> None:
        check_tile("activations", self.activations)
        check_tile("weights", self.weights)
        for name, example in (("gemm", "ReferenceGemm()"), ("quantizer", "quantize")):
            engine = getattr(self, name)
            if not callable(engine) or isinstance(engine, type):
                raise UsageError(f"{name} must be an engine, such as {example}; got {engine!r}")
        if self.activations.columns != self.weights.columns:
            raise PlanError(
                f"activations {self.activations} and weights {self.weights} need the same number "
                "of columns: they are multiplied along them"
            )
        kinds = {"scale": Scale, "quotient": Quotient, "source": Source, "wgrad": Wgrad}
        for name, kind in {**kinds, "saved": Saved, "nonfinite": Nonfinite}.items():
            check_choice(name, getattr(self, name), kind)
        if self.activations.rows != 1 and self.wgrad == "float8":
            raise UnsupportedError(
                f'wgrad="float8" needs activations in tiles of one row; got {self.activations}. '
                'Use wgrad="bfloat16".'
            )

    @classmethod
    def mxfp8(cls, **others: Any) -> Recipe:
        """Return the recipe of OCP MXFP8: 1 x 32 tiles of both operands, UE8M0 scales. Pure."""
        tile = Tile(1, 32)
        return cls(activations=tile, weights=tile, scale="ue8m0", **others)

    @property
    def gradients(self) -> Tile:
        """Tile of the gradient of an output: its inner side is the transposed weights'."""
        return Tile(self.activations.rows, self.transposed_weights.columns)

    @property
    def transposed_weights(self) -> Tile:
        """Tile of the transposed weights."""
        return self.weights if self.weights.rows == 1 else self.weights.transposed

    def quantize(self, x: Tensor, tile: Tile) -> Quantized:
        """Quantize as the recipe says, with its engine. Local."""
        return self.quantizer(x, tile, **self._how)

    def quantize_both(self, x: Tensor, tile: Tile) -> tuple[Quantized, Quantized]:
        """Quantize rows, and the transpose in tiles of `activations`. Local.

        In one pass where the engine can, and the tiles are the same.
        """
        if tile == self.activations and isinstance(self.quantizer, FusedQuantizer):
            return self.quantizer.both(x, tile, **self._how)
        return self.quantize(x, tile), self.quantize(x.mT, self.activations)

    def quantize_swiglu(self, gate_up: Tensor, scores: Tensor | None) -> Quantized:
        """Quantize an activation from what it is computed from. Local."""
        if isinstance(self.quantizer, FusedQuantizer):
            return self.quantizer.swiglu(gate_up, scores, self.activations, **self._how)
        return self.quantize(swiglu(gate_up, scores), self.activations)

    def quantize_swiglu_both(
        self, gate_up: Tensor, scores: Tensor | None
    ) -> tuple[Quantized, Quantized]:
        """Quantize an activation and its transpose. Local."""
        if isinstance(self.quantizer, FusedQuantizer):
            return self.quantizer.swiglu_both(gate_up, scores, self.activations, **self._how)
        return self.quantize_both(swiglu(gate_up, scores), self.activations)

    def quantize_weight(self, weight: Tensor) -> Quantized:
        """Quantize a weight, or the weights of experts, from the recipe's `source`. Local.

        Raises:
            UsageError: `source="float32"`, and the weight has less precision.
        """
        if self.source == "bfloat16":
            weight = weight.detach().bfloat16()
        elif weight.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f'source="float32" quantizes master weights; got one in {weight.dtype}, which '
                'rounds twice. Pass float32 weights, or use source="bfloat16" on both sides.'
            )
        return self.quantize(weight, self.weights)

    def describe(self) -> dict[str, str]:
        """Return by name all that decides codes, scales and how they are stored. Pure."""
        return {
            "codes": "float8_e4m3fn",
            "activations": f"{self.activations.rows}x{self.activations.columns}",
            "weights": f"{self.weights.rows}x{self.weights.columns}",
            "scale": {"float32": "float32", "ue8m0": "ue8m0, rounded up"}[self.scale],
            "quotient": self.quotient,
            "source": self.source,
            "layout": "codes [out, in], scales [out tiles, in tiles]",
        }

    def fingerprint(self, layers: Iterable[str] = ()) -> str:
        """Return sixteen hex digits of `describe()` and of the names of quantized layers. Pure.

        Neither the engines nor what only gradients see: those may differ between the two sides.

        Args:
            layers: as `convert` returned them, if both sides are to exclude the same.
        """
        names = None if isinstance(layers, str) or not isinstance(layers, Iterable) else set(layers)
        if names is None or not all(isinstance(name, str) for name in names):
            raise UsageError(f"layers must be names, as convert returned them; got {layers!r:.60}")
        facts = [*self.describe().items(), *sorted(names)]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @property
    def _how(self) -> dict[str, Any]:
        return {"scale": self.scale, "quotient": self.quotient, "nonfinite": self.nonfinite}


def check_recipe(recipe: object) -> None:
    """Refuse what is no recipe. Local.

    Raises:
        UsageError: with what was passed.
    """
    if not isinstance(recipe, Recipe):
        raise UsageError(f"recipe must be a Recipe, such as Recipe(); got {recipe!r:.60}")
