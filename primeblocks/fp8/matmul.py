"""Matrix products in float8 with gradients: dense, and of experts over grouped rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ShapeError, UnsupportedError
from ..groups import check_tensors
from ..layout import local_part
from .quantize import Quantized
from .recipe import Recipe, check_recipe
from .reference import runs

__all__ = ["WeightCodes", "grouped_matmul", "matmul", "quantize_both_ways"]


class WeightCodes(NamedTuple):
    """A weight, quantized for forward, and for the gradient of the input."""

    forward: Quantized
    backward: Quantized


def quantize_both_ways(weight: Tensor, recipe: Recipe) -> WeightCodes:
    """Quantize `[..., out, in]` for forward and backward. Local.

    Backward uses the same codes, transposed, where the tiles have several rows; copied if the
    engine needs its operands contiguous.
    """
    forward = recipe.quantize_weight(weight)
    if recipe.weights.rows == 1:
        return WeightCodes(forward, recipe.quantize_weight(weight.mT))
    backward = forward.transposed
    if recipe.gemm.k_major:
        codes = backward.codes.view(torch.uint8).contiguous().view(backward.codes.dtype)
        backward = Quantized(codes, backward.scales.contiguous(), backward.tile)
    return WeightCodes(forward, backward)


def matmul(
    x: Tensor, weight: Tensor, *, recipe: Recipe, codes: WeightCodes | None = None
) -> Tensor:
    """`x @ weight.T`, both rounded to float8; differentiable in both.

    The gradient of `x` is a float8 product too, with the same codes of `weight`, transposed; that
    of `weight` has operands as `recipe.wgrad` says. Local.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        codes: of `weight`, if they are at hand; see `WeightCache`.

    Returns:
        `[..., out]` in the dtype of `x`.

    Raises:
        ShapeError: the inner dims differ.
        UnsupportedError: `weight` is sharded over ranks.
        UsageError: no recipe; a value is not finite and the recipe raises then.
    """
    check_recipe(recipe)
    check_tensors(x=x, weight=weight)
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"x {list(x.shape)} and weight {list(weight.shape)} do not multiply")
    _refuse_shards(weight)
    flat = _Matmul.apply(x.reshape(-1, x.shape[-1]), weight, None, recipe, codes)
    return flat.reshape(*x.shape[:-1], weight.shape[0])


def grouped_matmul(
    x: Tensor,
    experts: Tensor,
    offsets: Tensor,
    *,
    recipe: Recipe,
    codes: WeightCodes | None = None,
) -> Tensor:
    """`matmul` of consecutive groups of rows, each with its expert's weight.

    An expert without rows takes part with a gradient of zeros; rows past the last offset give
    zeros. Local. On a GPU `offsets` stays there, and so nothing compares it with the rows; on a
    CPU it is checked.

    Args:
        x: `[tokens, in]`, sorted by expert.
        experts: `[experts, out, in]`.
        offsets: int32 or int64 `[experts]`, where each expert's rows end.

    Raises:
        ShapeError: shapes do not fit, or offsets on a CPU do not rise, or end past the tokens.
        UnsupportedError: `experts` is sharded over ranks.
    """
    check_recipe(recipe)
    check_tensors(x=x, experts=experts, offsets=offsets)
    if experts.ndim != 3 or x.ndim != 2 or x.shape[1] != experts.shape[2]:
        raise ShapeError(f"x {list(x.shape)} and experts {list(experts.shape)} do not multiply")
    if offsets.ndim != 1 or offsets.is_floating_point() or not len(experts):
        raise ShapeError(
            "needs at least one expert, and for each an integer offset at which its rows end; got "
            f"{len(experts)} experts and offsets {offsets.dtype} {list(offsets.shape)}"
        )
    if len(offsets) != len(experts):
        raise ShapeError(f"{len(experts)} experts need as many offsets; got {len(offsets)}")
    if offsets.device.type == "cpu":
        _check_offsets(offsets, len(x))
    _refuse_shards(experts)
    return _Matmul.apply(x, experts, offsets.int(), recipe, codes)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offsets: Tensor | None,
        recipe: Recipe,
        codes: WeightCodes | None,
    ) -> Tensor:
        if codes is None:
            codes = quantize_both_ways(weight, recipe)
        saved, quantized = _save(x, recipe, wanted=ctx.needs_input_grad[1])
        transposed = codes.backward
        ctx.save_for_backward(transposed.codes, transposed.scales, offsets, *saved)
        ctx.recipe, ctx.shape, ctx.dtypes = recipe, weight.shape, (x.dtype, weight.dtype)
        return _multiply(quantized, codes.forward, offsets, recipe).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, offsets, *saved = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        dx = dw = dy_columns = None
        if ctx.needs_input_grad[0]:
            weight = Quantized(codes, scales, recipe.transposed_weights)
            if recipe.wgrad == "float8" and ctx.needs_input_grad[1]:
                rows, dy_columns = recipe.quantize_both(dy, recipe.gradients)
            else:
                rows = recipe.quantize(dy, recipe.gradients)
            dx = _multiply(rows, weight, offsets, recipe).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(dy, dy_columns, saved, offsets, recipe)
            dw = dw.reshape(ctx.shape).to(ctx.dtypes[1])
        return dx, dw, None, None, None


def _multiply(a: Quantized, b: Quantized, offsets: Tensor | None, recipe: Recipe) -> Tensor:
    return recipe.gemm(a, b) if offsets is None else recipe.gemm.grouped(a, b, offsets)


def _save(x: Tensor, recipe: Recipe, *, wanted: bool) -> tuple[tuple[Tensor, ...], Quantized]:
    """What backward needs of the input, and the input quantized for forward."""
    if not wanted:
        return (), recipe.quantize(x, recipe.activations)
    if recipe.saved == "input":
        return (x,), recipe.quantize(x, recipe.activations)
    if recipe.wgrad == "float8":  # Then only its columns are needed.
        quantized, columns = recipe.quantize_both(x, recipe.activations)
        return (columns.codes, columns.scales), quantized
    quantized = recipe.quantize(x, recipe.activations)
    return (quantized.codes, quantized.scales), quantized


def _weight_gradient(
    dy: Tensor,
    dy_columns: Quantized | None,
    saved: list[Tensor],
    offsets: Tensor | None,
    recipe: Recipe,
) -> Tensor:
    """Float32 or bfloat16 `dy.T @ x`; `[experts, out, in]` where there are offsets."""
    tile = recipe.activations
    kept = Quantized(saved[0], saved[1], tile) if len(saved) == 2 else None
    if recipe.wgrad == "float8":
        a = recipe.quantize(dy.mT, tile) if dy_columns is None else dy_columns
        b = recipe.quantize(saved[0].mT, tile) if kept is None else kept
        return recipe.gemm(a, b) if offsets is None else recipe.gemm.k_grouped(a, b, offsets)
    x = saved[0] if kept is None else kept.dequantize()
    dtype = torch.float32 if recipe.wgrad == "float32" else torch.bfloat16
    dy, x = dy.to(dtype), x.to(dtype)
    if offsets is not None and dy.is_cuda and dtype is torch.bfloat16:
        return F.grouped_mm(dy.mT, x, offs=offsets)
    if not dy.is_cuda:
        dy, x = dy.float(), x.float()  # The same operands; the sum is float32 everywhere.
    if offsets is None:
        return dy.mT @ x
    return torch.stack([dy[rows].mT @ x[rows] for rows in runs(offsets)])


def _check_offsets(offsets: Tensor, tokens: int) -> None:
    ends = offsets.tolist()
    if any(end < start for start, end in zip([0, *ends], ends, strict=False)) or ends[-1] > tokens:
        raise ShapeError(f"offsets must rise from 0 to at most the {tokens} tokens; got {ends}")


def _refuse_shards(weight: Tensor) -> None:
    if local_part(weight) is not weight:
        raise UnsupportedError(
            "the weight is a DTensor, whose shards would cut through tiles. Under FSDP2 multiply "
            "inside the layer, where it is whole; of a mesh of experts pass weight.to_local()."
        )
