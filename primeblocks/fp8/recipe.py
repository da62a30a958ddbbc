"""Recipes, which set the tiles, the rounding and the kernels of float8 products."""

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
    """A hashable kernel that multiplies quantized matrices.

    Results are float32 or bfloat16. `k_major` is True if both operands must be contiguous along the
    inner dim. If `k_major` is True and tiles of weights have several rows, each quantization of a
    weight also copies the transposed codes.
    """

    @property
    def k_major(self) -> bool: ...

    def __call__(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply `a @ b.T`."""
        ...

    def grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Multiply each expert's rows of `a` by `b[expert].T`.

        Args:
            a: `[tokens, in]`, with tokens sorted by expert.
            b: `[experts, out, in]`.
            offsets: int32 `[experts]`, the end of each expert's rows. Kernels for a GPU do not copy
                `offsets` to the host.

        Returns:
            `[tokens, out]`, with rows of zeros after the last offset.
        """
        ...

    def k_grouped(self, a: Quantized, b: Quantized, offsets: Tensor) -> Tensor:
        """Compute `a @ b.T` per expert, over the expert's range of the inner dim.

        Args:
            a: `[out, tokens]`, in tiles along the tokens. A tile may span several experts.
            b: `[in, tokens]`.

        Returns:
            float32 `[experts, out, in]`, with zeros for an expert without tokens.
        """
        ...

    def __hash__(self) -> int: ...


class Quantizer(Protocol):
    """A hashable kernel that returns the same bits as `quantize`."""

    def __call__(
        self, x: Tensor, tile: Tile, *, scale: Scale, quotient: Quotient, nonfinite: Nonfinite
    ) -> Quantized: ...

    def __hash__(self) -> int: ...


@runtime_checkable
class FusedQuantizer(Protocol):
    """A `Quantizer` that can also compute a SwiGLU or a transpose while it reads the input.

    `how` stands for the keyword arguments of a `Quantizer`: `scale`, `quotient` and `nonfinite`.
    """

    def both(self, x: Tensor, tile: Tile, **how: Any) -> tuple[Quantized, Quantized]:
        """Quantize `x` and `x.mT`, both in tiles of size `tile`."""
        ...

    def swiglu(self, gate_up: Tensor, scores: Tensor | None, tile: Tile, **how: Any) -> Quantized:
        """Quantize `primeblocks.fp8.quantize.swiglu(gate_up, scores)`."""
        ...

    def swiglu_both(
        self, gate_up: Tensor, scores: Tensor | None, tile: Tile, **how: Any
    ) -> tuple[Quantized, Quantized]:
        """Quantize `primeblocks.fp8.quantize.swiglu(gate_up, scores)` and its transpose."""
        ...


@dataclass(frozen=True)
class Recipe:
    """The tiles, rounding rules and kernels of float8 products. Hashable.

    Equal recipes round in the same way. To check that recipes of two processes round in the same
    way, compare `fingerprint`.

    Args:
        activations: tile of activations. See the property `gradients` for the tile of gradients.
        weights: tile of weights. If a tile has several rows, the gradient of the input uses the
            transposed codes. If a tile has one row, the transposed weight is quantized separately
            for this gradient.
        scale: kind of scales. `"ue8m0"` scales are rounded up to powers of two.
        quotient: the formula for scaled values. See `quantize`.
        source: `"bfloat16"` quantizes weights after rounding to bfloat16, the dtype in which FSDP2
            gathers weights and engines load weights. `"float32"` quantizes master weights, which
            must be float32 or float64.
        wgrad: dtype of the operands in products for weight gradients. Sums are always float32.
        saved: the data that forward keeps for the weight's gradient: the input, or float8 codes of
            the input, which take one byte per value.
        nonfinite: with `"nan"`, results that depend on a value that is not finite are NaN. With
            `"raise"`, each operand is checked, and the host waits for the GPU.
        gemm: the kernel that multiplies. Installed packages do not change the default.
        quantizer: the kernel that quantizes. All quantizers return the same bits.

    Raises:
        UsageError: `activations` or `weights` is not a `Tile`, or a kernel is not callable.
        PlanError: the tiles of `activations` and `weights` have different numbers of columns.
        UnsupportedError: a text argument, such as `scale`, has an unknown value. Also raised for
            `wgrad="float8"` if tiles of activations have several rows.
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
                raise UsageError(f"{name} must be a kernel, such as {example}; got {engine!r}.")
        if self.activations.columns != self.weights.columns:
            raise PlanError(
                f"activations {self.activations} and weights {self.weights} need the same number "
                "of columns, because they are multiplied along them."
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
        """Return the recipe of OCP MXFP8: 1 x 32 tiles in both operands, and UE8M0 scales. Pure."""
        tile = Tile(1, 32)
        return cls(activations=tile, weights=tile, scale="ue8m0", **others)

    @property
    def gradients(self) -> Tile:
        """The tile of output gradients, with as many columns as `transposed_weights`."""
        return Tile(self.activations.rows, self.transposed_weights.columns)

    @property
    def transposed_weights(self) -> Tile:
        """The tile of transposed weights."""
        return self.weights if self.weights.rows == 1 else self.weights.transposed

    def quantize(self, x: Tensor, tile: Tile) -> Quantized:
        """Quantize `x` with the recipe's quantizer and options. Local."""
        return self.quantizer(x, tile, **self._how)

    def quantize_both(self, x: Tensor, tile: Tile) -> tuple[Quantized, Quantized]:
        """Quantize `x` in tiles of size `tile`, and `x.mT` in tiles of `activations`. Local.

        A `FusedQuantizer` reads `x` only once if `tile` equals `activations`.
        """
        if tile == self.activations and isinstance(self.quantizer, FusedQuantizer):
            return self.quantizer.both(x, tile, **self._how)
        return self.quantize(x, tile), self.quantize(x.mT, self.activations)

    def quantize_swiglu(self, gate_up: Tensor, scores: Tensor | None) -> Quantized:
        """Quantize `primeblocks.fp8.quantize.swiglu(gate_up, scores)`. Local."""
        if isinstance(self.quantizer, FusedQuantizer):
            return self.quantizer.swiglu(gate_up, scores, self.activations, **self._how)
        return self.quantize(swiglu(gate_up, scores), self.activations)

    def quantize_swiglu_both(
        self, gate_up: Tensor, scores: Tensor | None
    ) -> tuple[Quantized, Quantized]:
        """Quantize `swiglu(gate_up, scores)` and its transpose. Local."""
        if isinstance(self.quantizer, FusedQuantizer):
            return self.quantizer.swiglu_both(gate_up, scores, self.activations, **self._how)
        return self.quantize_both(swiglu(gate_up, scores), self.activations)

    def quantize_weight(self, weight: Tensor) -> Quantized:
        """Quantize a weight, or stacked weights of experts, as `source` specifies. Local.

        Raises:
            UsageError: `source` is `"float32"`, and the weight has less precision than float32.
        """
        if self.source == "bfloat16":
            weight = weight.detach().bfloat16()
        elif weight.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f'source="float32" quantizes master weights; got one in {weight.dtype}, which '
                'rounds twice. Pass float32 weights, or use source="bfloat16" on both sides.'
            )
        return self.quantize(weight, self.weights)

    def fingerprint(self, layers: Iterable[str] = ()) -> str:
        """Return 16 hex digits: a hash of `layers` and of all options that determine codes. Pure.

        The hash does not depend on kernels, `nonfinite`, or options that only gradients use. The
        values of these options may differ between trainer and inference engine.

        Args:
            layers: the names that `convert` returned. Pass `layers` if trainer and engine must
                convert the same layers.

        Raises:
            UsageError: `layers` are not names.
        """
        names = None if isinstance(layers, str) or not isinstance(layers, Iterable) else set(layers)
        if names is None or not all(isinstance(name, str) for name in names):
            raise UsageError(f"layers must be names, as convert returned them; got {layers!r:.60}.")
        choices = {
            "codes": "float8_e4m3fn",
            "activations": f"{self.activations.rows}x{self.activations.columns}",
            "weights": f"{self.weights.rows}x{self.weights.columns}",
            "scale": {"float32": "float32", "ue8m0": "ue8m0, rounded up"}[self.scale],
            "quotient": self.quotient,
            "source": self.source,
            "layout": "codes [out, in], scales [out tiles, in tiles]",
        }
        facts = [*choices.items(), *sorted(names)]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @property
    def _how(self) -> dict[str, Any]:
        return {"scale": self.scale, "quotient": self.quotient, "nonfinite": self.nonfinite}


def check_recipe(recipe: object) -> None:
    """Raise UsageError unless `recipe` is a `Recipe`. Local."""
    if not isinstance(recipe, Recipe):
        raise UsageError(f"recipe must be a Recipe, such as Recipe(); got {recipe!r:.60}.")
