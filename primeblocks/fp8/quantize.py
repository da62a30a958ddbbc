"""Block-scaled float8: codes, scales, and back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from ..errors import ShapeError, UsageError
from ..groups import check_tensors
from .formats import (
    Nonfinite,
    Quotient,
    Scale,
    Tile,
    check_choice,
    check_tile,
    scales_of,
    tiled,
)

__all__ = [
    "Quantized",
    "check_operands",
    "measure_error",
    "quantize",
    "refuse_nonfinite",
    "round_trip",
    "swiglu",
]

# Values that are scaled at once on a CPU: in float32 and with their codes they fit its cache.
_AT_ONCE = 1 << 17


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix, or a batch of them, as float8 codes and a scale a tile: value = code * scale.

    Args:
        codes: float8_e4m3fn `[..., rows, columns]`.
        scales: float32 `[..., row tiles, column tiles]`; powers of two where the kind is UE8M0.
    """

    codes: Tensor
    scales: Float32[Tensor, "*batch row_tiles column_tiles"]
    tile: Tile

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def transposed(self) -> Quantized:
        """The transposed matrix, from the same codes; nothing is rounded again. A view."""
        return Quantized(self.codes.mT, self.scales.mT, self.tile.transposed)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Code times scale, computed in `dtype`. Local."""
        rows, columns = self.shape[-2:]
        by_row = self.scales.to(dtype).repeat_interleave(self.tile.rows, dim=-2)[..., :rows, :]
        spread = by_row.repeat_interleave(self.tile.columns, dim=-1)[..., :columns]
        return self.codes.to(dtype) * spread


def quantize(
    x: Tensor,
    tile: Tile,
    *,
    scale: Scale = "float32",
    quotient: Quotient = "reciprocal",
    nonfinite: Nonfinite = "raise",
) -> Quantized:
    """Round a matrix to E4M3 with one scale a tile, so that its largest value becomes 448.

    The scale has no floor but float32's own, a normal number, so a tile of gradients keeps its
    relative precision down to a largest value of 5e-36. A tile of zeros has scale 1. All in
    float32, rounded to nearest even. Local; the host waits for the device if `nonfinite="raise"`.

    Args:
        x: `[..., rows, columns]`; the matrices of a batch share no tile.
        scale: `"ue8m0"` rounds scales up to powers of two, as Blackwell's engines need them.
        quotient: `"reciprocal"` is DeepGEMM's form; they differ in about a code of two thousand.
        nonfinite: `"nan"` gives a tile with such a value the scale NaN, and so what it is
            multiplied into, without a look at it from the host.

    Raises:
        ShapeError: no matrix of floating-point numbers.
        UsageError: a value is not finite in float32, or `tile` is no `Tile`.
        UnsupportedError: another word for `scale`, `quotient` or `nonfinite`.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3; UE8M0: OCP Microscaling Formats 1.0.
    """
    check_operands(x, tile, scale, quotient, nonfinite)
    values = tiled(x.detach(), tile)
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=x.device)
    shape = *values.shape[:-3], values.shape[-2]
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    for part in _parts(values):
        codes[part], scales[part] = _round_tiles(values[part], scale, quotient)
    codes = codes.flatten(-2).flatten(-3, -2)[..., : x.shape[-2], : x.shape[-1]]
    quantized = Quantized(codes, scales, tile)
    if nonfinite == "raise":
        refuse_nonfinite(x, quantized)
    return quantized


def swiglu(gate_up: Tensor, scores: Tensor | None = None) -> Tensor:
    """`silu(gate) * up * score` in float32, rounded once, to the dtype of `gate_up`. Local.

    Args:
        gate_up: `[tokens, 2 * inner]`, the gate first.
        scores: `[tokens]`; absent, 1.

    Returns:
        `[tokens, inner]`; differentiable.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    h = torch.nn.functional.silu(gate) * up
    if scores is not None:
        h = h * scores.float()[:, None]
    return h.to(gate_up.dtype)


def round_trip(x: Tensor, tile: Tile, **how: Any) -> Tensor:
    """Return the nearest matrix that float8 codes can express, in the dtype of `x`. Local.

    Args:
        how: as for `quantize`.
    """
    return quantize(x, tile, **how).dequantize().to(x.dtype)


def measure_error(x: Tensor, quantized: Quantized) -> float:
    """Return the relative error in the Frobenius norm, in float64; 0 for zeros. Local."""
    check_tensors(x=x)
    if not isinstance(quantized, Quantized) or x.shape != quantized.shape:
        shape = getattr(quantized, "shape", None)
        raise ShapeError(f"needs x and what quantize made of it; got {list(x.shape)} and {shape}")
    exact = x.detach().double()
    norm = exact.norm()
    if norm == 0:
        return 0.0
    return float((quantized.dequantize(torch.float64) - exact).norm() / norm)


def _round_tiles(values: Tensor, scale: Scale, quotient: Quotient) -> tuple[Tensor, Tensor]:
    """Codes and scales of `[..., row tiles, rows, column tiles, columns]`: the definition."""
    scaled = values.float()
    amax = scaled.abs().amax(-1).amax(-2)  # Faster than over both dims at once.
    scales, by = scales_of(amax, scale, quotient)
    by = by[..., None, :, None]
    # A rounding beyond 448 comes back to it; nothing finite gets as far as the 464 from which on a
    # cast gives NaN (torch 2.11) or saturates (since 2.12).
    scaled = scaled / by if quotient == "division" else scaled * by
    return scaled.to(torch.float8_e4m3fn), scales


def _parts(values: Tensor) -> list[tuple[Any, ...]]:
    """Cut the row tiles of a batch into parts that a CPU's cache holds; one part on a device."""
    *batch, down = values.shape[:-3]
    if not values.numel():
        return []
    if values.device.type != "cpu":
        return [(...,)]
    step = max(1, _AT_ONCE // values.shape[-3:].numel())
    return [
        (*place, slice(start, start + step))
        for place in itertools.product(*map(range, batch))
        for start in range(0, down, step)
    ]


def check_operands(
    x: Tensor, tile: Tile, scale: Scale, quotient: Quotient, nonfinite: Nonfinite
) -> None:
    """Refuse what no quantizer takes. Local; raises as `quantize`."""
    check_tile("tile", tile)
    check_tensors(x=x)
    check_choice("scale", scale, Scale)
    check_choice("quotient", quotient, Quotient)
    check_choice("nonfinite", nonfinite, Nonfinite)
    if x.ndim < 2 or not x.is_floating_point() or x.element_size() == 1:
        raise ShapeError(f"quantize takes a floating-point matrix; got {x.dtype} {list(x.shape)}")


def refuse_nonfinite(x: Tensor, quantized: Quantized) -> None:
    """Refuse values that are not finite; the host waits. Local.

    Raises:
        UsageError: with their number.
    """
    if not quantized.scales.isfinite().all():
        bad = int((~x.float().isfinite()).sum())
        raise UsageError(f"{bad} of {x.numel()} values are not finite; float8 has no infinity")
