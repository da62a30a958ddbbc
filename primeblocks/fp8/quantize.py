"""Block-scaled float8: number formats, tiles that share a scale, codes, and values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float32
from torch import Tensor

from ..errors import ShapeError, UnsupportedError, UsageError
from ..groups import check_tensors, outside_graphs

__all__ = [
    "E4M3_MAX",
    "Nonfinite",
    "Quantized",
    "Quotient",
    "Scale",
    "Tile",
    "check_choice",
    "check_operands",
    "check_tile",
    "measure_error",
    "quantize",
    "refuse_nonfinite",
    "scales_of",
    "swiglu",
    "tiled",
]

# The number of values scaled at once on a CPU. As float32 and as codes, they fit into its cache.
_AT_ONCE = 1 << 17

E4M3_MAX = 448.0
"""The largest float8_e4m3fn, a format of 4 exponent and 3 mantissa bits without infinity."""

Scale = Literal["float32", "ue8m0"]
"""The kind of a tile's scale: any float32, or powers of two, rounded up (RCEIL)."""

Quotient = Literal["reciprocal", "division", "amax"]
"""The form of a scaled value: `x * (1 / scale)`, `x / scale` or `x * (448 / amax)`.

With `scale="ue8m0"`, `"amax"` means the same as `"reciprocal"`.
"""

Nonfinite = Literal["raise", "nan"]
"""The result for a value that is not finite: an error, or NaN as scale and codes of its tile."""


@dataclass(frozen=True)
class Tile:
    """The number of rows and columns that share a scale. The last tiles of a matrix may be smaller.

    Raises:
        UsageError: `rows` or `columns` is not a positive whole number.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        for side in (self.rows, self.columns):
            if not isinstance(side, Integral) or side < 1:
                raise UsageError(
                    f"a tile has positive sides; got {self.rows!r} x {self.columns!r}."
                )

    @property
    def transposed(self) -> Tile:
        return Tile(self.columns, self.rows)

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the numbers of row tiles and column tiles that cover a matrix. Pure."""
        return -(-rows // self.rows), -(-columns // self.columns)


def check_tile(name: str, value: object) -> None:
    """Raise UsageError unless `value` is a `Tile`. Local."""
    if not isinstance(value, Tile):
        raise UsageError(f"{name} must be a Tile, such as Tile(1, 128); got {value!r:.60}.")


def check_choice(name: str, value: object, kind: object) -> None:
    """Raise UnsupportedError unless `value` is one of a Literal's words. Local."""
    words = get_args(kind)
    if value not in words:
        raise UnsupportedError(
            f"{name} must be one of {', '.join(map(repr, words))}; got {value!r}."
        )


def scales_of(amax: Tensor, scale: Scale, quotient: Quotient) -> tuple[Tensor, Tensor]:
    """Return the scales of tiles whose largest magnitudes are `amax`, and divisors or factors.

    Values are scaled by the second result: a divisor for `"division"`, and otherwise a factor. A
    scale is at least the smallest normal float32, whose reciprocal is finite. A scale is 1 if
    `amax` is 0, and NaN if `amax` is not finite. Local. The host does not wait.
    """
    # Divide a tensor by a tensor. CUDA turns tensor / number into a product with a reciprocal, and
    # every device does so for number / tensor.
    largest = torch.full_like(amax, E4M3_MAX)
    scales = (amax / largest).clamp_(min=torch.finfo(torch.float32).tiny)
    if scale == "ue8m0":
        # Add one to the exponent if a mantissa bit is set. exp2(ceil(log2(s))) is wrong next to
        # powers of two.
        bits = (scales.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF
        scales = bits.view(torch.float32)
    scales.masked_fill_(amax == 0, 1.0)
    scales.masked_fill_(~amax.isfinite(), torch.nan)
    if quotient == "division":
        return scales, scales
    if quotient == "amax" and scale == "float32":
        factor = (largest / amax).clamp_(max=1 / torch.finfo(torch.float32).tiny)
        factor.masked_fill_(amax == 0, 1.0)
        return scales, factor.masked_fill_(scales.isnan(), torch.nan)
    return scales, scales.reciprocal()


def tiled(x: Tensor, tile: Tile) -> Tensor:
    """View `[..., rows, columns]` as `[..., row tiles, rows, column tiles, columns]`. Local.

    If the last tiles are cut, the matrix is copied and padded with zeros.
    """
    down, across = tile.grid(*x.shape[-2:])
    padding = (0, across * tile.columns - x.shape[-1], 0, down * tile.rows - x.shape[-2])
    whole = torch.nn.functional.pad(x, padding) if any(padding) else x
    return whole.unflatten(-1, (across, tile.columns)).unflatten(-3, (down, tile.rows))


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix or a batch of matrices, as float8 codes and scales: value = code * scale.

    Args:
        codes: float8_e4m3fn `[..., rows, columns]`.
        scales: float32 `[..., row tiles, column tiles]`. UE8M0 scales are powers of two.
        tile: the number of rows and columns that share a scale.
    """

    codes: Tensor
    scales: Float32[Tensor, "*batch row_tiles column_tiles"]
    tile: Tile

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def transposed(self) -> Quantized:
        """Return the transposed matrix as a view of the codes and scales, without rounding."""
        return Quantized(self.codes.mT, self.scales.mT, self.tile.transposed)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return each code times the scale of its tile, computed in `dtype`. Local."""
        rows, columns = self.shape[-2:]
        by_row = self.scales.to(dtype).repeat_interleave(self.tile.rows, dim=-2)[..., :rows, :]
        spread = by_row.repeat_interleave(self.tile.columns, dim=-1)[..., :columns]
        return self.codes.to(dtype) * spread


@outside_graphs
def quantize(
    x: Tensor,
    tile: Tile,
    *,
    scale: Scale = "float32",
    quotient: Quotient = "reciprocal",
    nonfinite: Nonfinite = "raise",
) -> Quantized:
    """Round a matrix to E4M3 with one scale per tile.

    A scale maps the largest magnitude of a tile to 448, or to at most 448 with UE8M0 scales. Scales
    are at least the smallest normal float32. A tile keeps its relative precision if its largest
    magnitude is at least 5e-36. A tile of zeros has scale 1. All computations are in float32.
    Local. With `nonfinite="raise"` the host waits for the device.

    Args:
        x: `[..., rows, columns]`. Matrices of a batch do not share tiles.
        tile: the number of rows and columns that share a scale.
        scale: `"ue8m0"` rounds scales up to powers of two, which kernels on Blackwell require.
        quotient: the formula for scaled values (see `Quotient`). DeepGEMM uses `"reciprocal"`.
        nonfinite: `"raise"` refuses values that are not finite. If a tile contains a value that is
            not finite, `"nan"` sets the scale of the tile to NaN.

    Raises:
        ShapeError: `x` is not a matrix of floating-point numbers.
        UsageError: a value is not finite in float32, or `tile` is not a `Tile`.
        UnsupportedError: the value of `scale`, `quotient` or `nonfinite` is not supported.

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
    """Return `silu(gate) * up * score`, computed in float32 and rounded once. Local.

    Args:
        gate_up: `[tokens, 2 * inner]`, with the columns of the gate first.
        scores: `[tokens]`. Without `scores`, every score is 1.

    Returns:
        `[tokens, inner]` in the dtype of `gate_up`. Differentiable.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    h = torch.nn.functional.silu(gate) * up
    if scores is not None:
        h = h * scores.float()[:, None]
    return h.to(gate_up.dtype)


def measure_error(x: Tensor, quantized: Quantized) -> float:
    """Return the relative error in the Frobenius norm, in float64, or 0 if `x` is zero. Local.

    Raises:
        ShapeError: `x` is not a tensor, or `quantized` is not a `Quantized` of the shape of `x`.
    """
    check_tensors(x=x)
    if not isinstance(quantized, Quantized) or x.shape != quantized.shape:
        shape = getattr(quantized, "shape", None)
        raise ShapeError(
            f"measure_error needs x and its Quantized; got {list(x.shape)} and {shape}."
        )
    exact = x.detach().double()
    norm = exact.norm()
    if norm == 0:
        return 0.0
    return float((quantized.dequantize(torch.float64) - exact).norm() / norm)


def _round_tiles(values: Tensor, scale: Scale, quotient: Quotient) -> tuple[Tensor, Tensor]:
    """Return codes and scales of `[..., row tiles, rows, column tiles, columns]`."""
    scaled = values.float()
    amax = scaled.abs().amax(-1).amax(-2)  # Faster than over both dims at once.
    scales, by = scales_of(amax, scale, quotient)
    by = by[..., None, :, None]
    # Values that round beyond 448 become 448. No finite value reaches 464, from which a cast gives
    # NaN (torch 2.11) or saturates (since 2.12).
    scaled = scaled / by if quotient == "division" else scaled * by
    return scaled.to(torch.float8_e4m3fn), scales


def _parts(values: Tensor) -> list[tuple[Any, ...]]:
    """Cut a batch's row tiles into parts that fit a CPU's cache. Other devices get one part."""
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
    """Check the operands of a quantizer. Local. Raises the errors of `quantize`."""
    check_tile("tile", tile)
    check_tensors(x=x)
    check_choice("scale", scale, Scale)
    check_choice("quotient", quotient, Quotient)
    check_choice("nonfinite", nonfinite, Nonfinite)
    if x.ndim < 2 or not x.is_floating_point() or x.element_size() == 1:
        raise ShapeError(f"quantize takes a floating-point matrix; got {x.dtype} {list(x.shape)}.")


def refuse_nonfinite(x: Tensor, quantized: Quantized) -> None:
    """Raise UsageError if values are not finite. The host waits."""
    if not quantized.scales.isfinite().all():
        bad = int((~x.float().isfinite()).sum())
        said = f"{bad} of {x.numel()} values are" if bad else "values of a SwiGLU are"
        raise UsageError(f"{said} not finite, and float8 has no infinity.")
