"""Matrix products in float8 with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError
from ..groups import check_tensors
from .quantize import Quantized, quantize
from .recipe import Recipe, check_recipe

__all__ = ["grouped_matmul", "grouped_mm_fn", "matmul"]


def matmul(x: Tensor, weight: Tensor, *, recipe: Recipe) -> Tensor:
    """`x @ weight.T`, both rounded to float8; differentiable in both.

    The gradient of `x` is a float8 product too, with the same codes of `weight`, transposed; that
    of `weight` is computed in `recipe.wgrad` from values that were not rounded. Local.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.

    Returns:
        `[..., out]` in the dtype of `x`.

    Raises:
        ShapeError: the inner dims differ.
        UsageError: no recipe; a value, or in backward a gradient, is not finite.
    """
    check_recipe(recipe)
    check_tensors(x=x, weight=weight)
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"x {list(x.shape)} and weight {list(weight.shape)} do not multiply")
    flat = _Matmul.apply(x.reshape(-1, x.shape[-1]), weight, recipe)
    return flat.reshape(*x.shape[:-1], weight.shape[0])


def grouped_matmul(x: Tensor, experts: Tensor, offsets: Tensor, *, recipe: Recipe) -> Tensor:
    """`matmul` of consecutive groups of rows, each with its expert's weight.

    An expert without rows takes part with a gradient of zeros. Local; reads `offsets` on the host.

    Args:
        x: `[tokens, in]`, sorted by expert.
        experts: `[experts, out, in]`.
        offsets: `[experts]`, where each expert's rows end.

    Raises:
        ShapeError: shapes do not fit, or the offsets do not rise to the number of tokens.
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
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    rising = all(start <= end for start, end in zip(starts, ends, strict=True))
    if len(ends) != len(experts) or not rising or ends[-1] != len(x):
        raise ShapeError(
            f"{len(experts)} experts and {len(x)} tokens need as many rising offsets that end "
            f"there; got {ends}"
        )
    weights = experts.unbind(0)
    groups = zip(starts, ends, weights, strict=True)
    return torch.cat([matmul(x[start:end], w, recipe=recipe) for start, end, w in groups])


def grouped_mm_fn(recipe: Recipe) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return `grouped_matmul` under one recipe, as `f(x, experts, offsets)`. Pure."""

    def grouped_mm(x: Tensor, experts: Tensor, offsets: Tensor) -> Tensor:
        return grouped_matmul(x, experts, offsets, recipe=recipe)

    return grouped_mm


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        quantized = quantize(weight, recipe.weights)
        ctx.save_for_backward(x, quantized.codes, quantized.scales)
        ctx.recipe, ctx.weight_dtype = recipe, weight.dtype
        return recipe.gemm(quantize(x, recipe.activations), quantized).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = grads
        x, codes, scales = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        dx = dw = None
        if ctx.needs_input_grad[0]:
            weight = Quantized(codes, scales, recipe.weights).transposed
            dx = recipe.gemm(quantize(dy, recipe.gradients), weight).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dtype = recipe.wgrad_dtype
            dw = (dy.to(dtype).t() @ x.to(dtype)).to(ctx.weight_dtype)
        return dx, dw, None
