"""Float8 matrix products with gradients: dense, grouped by expert, and of a SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ShapeError, UnsupportedError
from ..groups import check_tensors, outside_graphs
from ..layout import local_part
from .quantize import Quantized, swiglu
from .recipe import Recipe, check_recipe
from .reference import runs

__all__ = ["WeightCodes", "grouped_matmul", "matmul", "quantize_both_ways", "swiglu_matmul"]


class WeightCodes(NamedTuple):
    """A weight that is quantized for the forward pass and for the gradient of the input."""

    forward: Quantized
    backward: Quantized


def quantize_both_ways(weight: Tensor, recipe: Recipe) -> WeightCodes:
    """Quantize a weight `[..., out, in]` for forward and backward. Local.

    If tiles have several rows, backward uses the same codes, transposed. These codes are copied if
    the kernel needs contiguous operands. If tiles have one row, the transposed weight is quantized
    for backward, so its codes differ from those of forward.
    """
    forward = recipe.quantize_weight(weight)
    if recipe.weights.rows == 1:
        return WeightCodes(forward, recipe.quantize_weight(weight.mT))
    backward = forward.transposed
    if recipe.gemm.k_major:
        codes = backward.codes.view(torch.uint8).contiguous().view(backward.codes.dtype)
        backward = Quantized(codes, backward.scales.contiguous(), backward.tile)
    return WeightCodes(forward, backward)


@outside_graphs
def matmul(
    x: Tensor, weight: Tensor, *, recipe: Recipe, codes: WeightCodes | None = None
) -> Tensor:
    """Compute `x @ weight.T` with both operands rounded to float8. Local.

    Differentiable in `x` and `weight`. The gradient of `x` is also a float8 product, with the codes
    `WeightCodes.backward` of the weight. The gradient of `weight` is a product of two matrices in
    the dtype `recipe.wgrad`.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        codes: precomputed codes of `weight`, for example from a `WeightCache`.

    Returns:
        `[..., out]` in the dtype of `x`. Under autocast, the dtype is the autocast dtype.

    Raises:
        ShapeError: the inner dims of `x` and `weight` differ.
        UnsupportedError: `weight` is sharded over ranks.
        UsageError: `recipe` is not a `Recipe`, or has `nonfinite="raise"` and a value is not
            finite.
    """
    check_recipe(recipe)
    check_tensors(x=x, weight=weight)
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"x {list(x.shape)} and weight {list(weight.shape)} do not multiply.")
    _check_operands(x, weight)
    flat = _Matmul.apply(_autocast(x).reshape(-1, x.shape[-1]), weight, None, recipe, codes)
    return flat.reshape(*x.shape[:-1], weight.shape[0])


@outside_graphs
def grouped_matmul(
    x: Tensor,
    experts: Tensor,
    offsets: Tensor,
    *,
    recipe: Recipe,
    codes: WeightCodes | None = None,
) -> Tensor:
    """Apply `matmul` to each expert's rows of `x` and the expert's weight. Local.

    The weight of an expert without rows gets a gradient of zeros. Rows of `x` after the last offset
    may have any values. These rows of the result are zeros. The values of `offsets` are checked
    only on a CPU, because on a GPU the host does not read `offsets`.

    Args:
        x: `[tokens, in]`, with tokens sorted by expert.
        experts: `[experts, out, in]`.
        offsets: int32 or int64 `[experts]`, the end of each expert's rows.

    Raises:
        ShapeError: shapes do not match. On a CPU, also raised if `offsets` decrease or exceed the
            number of tokens.
        UnsupportedError: `experts` is sharded over ranks.
    """
    check_recipe(recipe)
    check_tensors(x=x, experts=experts, offsets=offsets)
    if experts.ndim != 3 or x.ndim != 2 or x.shape[1] != experts.shape[2]:
        raise ShapeError(f"x {list(x.shape)} and experts {list(experts.shape)} do not multiply.")
    offsets = _checked_offsets(offsets, len(experts), len(x))
    _check_operands(x, experts)
    return _Matmul.apply(_autocast(x), experts, offsets, recipe, codes)


@outside_graphs
def swiglu_matmul(
    gate_up: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    *,
    recipe: Recipe,
    scores: Tensor | None = None,
    codes: WeightCodes | None = None,
) -> Tensor:
    """Multiply `swiglu(gate_up, scores)` by `weight`, without storing the activation. Local.

    The function has the same result and gradients as `swiglu` followed by `grouped_matmul`, or by
    `matmul` if you do not pass `offsets`. Instead of the activation, forward stores `gate_up` and
    `scores`, from which backward recomputes the activation. If the recipe's `saved` and `wgrad`
    are `"float8"`, forward also stores the activation's codes.

    Args:
        gate_up: `[tokens, 2 * in]`, with the columns of the gate first.
        weight: `[experts, out, in]`, or `[out, in]` without `offsets`.
        offsets: as for `grouped_matmul`.
        scores: `[tokens]`, one factor per row of the activation.

    Raises:
        ShapeError, UnsupportedError: as for `grouped_matmul`.
    """
    check_recipe(recipe)
    check_tensors(gate_up=gate_up, weight=weight)
    grouped = offsets is not None
    if gate_up.ndim != 2 or weight.ndim != 2 + grouped or gate_up.shape[1] != 2 * weight.shape[-1]:
        raise ShapeError(
            f"gate_up {list(gate_up.shape)} is not a pair of inputs of the weight "
            f"{list(weight.shape)}, {'with' if grouped else 'without'} offsets. Pass "
            "[tokens, 2 * in], the gate first."
        )
    if scores is not None:
        check_tensors(scores=scores)
    if scores is not None and scores.shape != gate_up.shape[:1]:
        raise ShapeError(
            f"scores must have one number for each of {len(gate_up)} rows; got "
            f"{list(scores.shape)}."
        )
    if offsets is not None:
        offsets = _checked_offsets(offsets, len(weight), len(gate_up))
    _check_operands(gate_up, weight)
    return _SwigluMatmul.apply(_autocast(gate_up), scores, weight, offsets, recipe, codes)


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
        saved, quantized = _save(x, offsets, recipe, wanted=ctx.needs_input_grad[1])
        transposed = codes.backward
        ctx.save_for_backward(transposed.codes, transposed.scales, offsets, *saved)
        ctx.recipe, ctx.dtypes = recipe, (x.dtype, weight.dtype)
        return _multiply(quantized, codes.forward, offsets, recipe).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        codes, scales, offsets, *saved = ctx.saved_tensors
        wanted, wanted_dw, *_ = ctx.needs_input_grad
        recipe: Recipe = ctx.recipe
        dx = dw = columns = None
        if wanted:
            dx, columns = _input_gradient(dy, codes, scales, offsets, recipe, both=wanted_dw)
            dx = dx.to(ctx.dtypes[0])
        if wanted_dw:
            dw = _weight_gradient(dy, columns, saved, offsets, recipe).to(ctx.dtypes[1])
        return dx, dw, None, None, None


class _SwigluMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        scores: Tensor | None,
        weight: Tensor,
        offsets: Tensor | None,
        recipe: Recipe,
        codes: WeightCodes | None,
    ) -> Tensor:
        if codes is None:
            codes = quantize_both_ways(weight, recipe)
        saved: tuple[Tensor, ...] = ()
        both = recipe.saved == recipe.wgrad == "float8" and ctx.needs_input_grad[2]
        ends = offsets if both else _shared(offsets, recipe)
        own = None if scores is None else _without_tail(scores, ends)
        if both:
            quantized, columns = recipe.quantize_swiglu_both(_without_tail(gate_up, ends), own)
            saved = columns.codes, columns.scales
        else:
            quantized = recipe.quantize_swiglu(_without_tail(gate_up, ends), own)
        transposed = codes.backward
        ctx.save_for_backward(transposed.codes, transposed.scales, offsets, gate_up, scores, *saved)
        ctx.recipe, ctx.dtype = recipe, weight.dtype
        return _multiply(quantized, codes.forward, offsets, recipe).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_create_graph()
        codes, scales, offsets, gate_up, scores, *saved = ctx.saved_tensors
        wanted, wanted_scores, wanted_dw, *_ = ctx.needs_input_grad
        recipe: Recipe = ctx.recipe
        with torch.enable_grad():
            inputs = [_without_tail(gate_up.detach(), offsets).requires_grad_(wanted)]
            if scores is not None:
                inputs.append(_without_tail(scores.detach(), offsets).requires_grad_(wanted_scores))
            h = swiglu(*inputs)
        found: list[Tensor | None] = [None, None]
        dw = columns = None
        if wanted or wanted_scores:
            dh, columns = _input_gradient(dy, codes, scales, offsets, recipe, both=wanted_dw)
            after = [one for one in inputs if one.requires_grad]
            gradients = iter(torch.autograd.grad(h, after, dh.to(h.dtype)))
            found = [next(gradients) if w else None for w in (wanted, wanted_scores)]
        if wanted_dw:
            kept = saved or [h.detach()]
            dw = _weight_gradient(dy, columns, kept, offsets, recipe).to(ctx.dtype)
        return *found, dw, None, None, None


def _input_gradient(
    dy: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    recipe: Recipe,
    *,
    both: bool,
) -> tuple[Tensor, Quantized | None]:
    """Return the input's gradient. With `both` and float8 `wgrad`, also return quantized `dy.T`."""
    weight, columns = Quantized(codes, scales, recipe.transposed_weights), None
    if both and recipe.wgrad == "float8":
        rows, columns = recipe.quantize_both(_without_tail(dy, offsets), recipe.gradients)
    else:
        rows = recipe.quantize(_without_tail(dy, _shared(offsets, recipe)), recipe.gradients)
    return _multiply(rows, weight, offsets, recipe), columns


def _autocast(x: Tensor) -> Tensor:
    """Return the input in the dtype that a product of torch would use under autocast."""
    kind = x.device.type
    taken = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if taken else x


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "gradients of gradients (create_graph=True) would leave float8 products out. Compute "
            "such a penalty with products in bfloat16."
        )


def _without_tail(x: Tensor, offsets: Tensor | None) -> Tensor:
    """Return `x` with zeros in rows after the last offset, where `x` may have any values."""
    if offsets is None or (offsets.device.type == "cpu" and int(offsets[-1]) == len(x)):
        return x
    rows = torch.arange(len(x), device=x.device) < offsets[-1]
    return torch.where(rows.unflatten(0, (-1, *[1] * (x.ndim - 1))), x, 0)


def _shared(offsets: Tensor | None, recipe: Recipe) -> Tensor | None:
    """Return `offsets` if rows after the last offset share tiles or checks with other rows."""
    return offsets if recipe.activations.rows > 1 or recipe.nonfinite == "raise" else None


def _multiply(a: Quantized, b: Quantized, offsets: Tensor | None, recipe: Recipe) -> Tensor:
    with torch.autocast(a.codes.device.type, enabled=False):  # Kernels run without autocast.
        return recipe.gemm(a, b) if offsets is None else recipe.gemm.grouped(a, b, offsets)


def _save(
    x: Tensor, offsets: Tensor | None, recipe: Recipe, *, wanted: bool
) -> tuple[tuple[Tensor, ...], Quantized]:
    """Return tensors of the input for backward, and the input quantized for forward."""
    if wanted and recipe.saved == recipe.wgrad == "float8":  # Backward needs only the columns.
        quantized, columns = recipe.quantize_both(_without_tail(x, offsets), recipe.activations)
        return (columns.codes, columns.scales), quantized
    quantized = recipe.quantize(_without_tail(x, _shared(offsets, recipe)), recipe.activations)
    if not wanted:
        return (), quantized
    return (x,) if recipe.saved == "input" else (quantized.codes, quantized.scales), quantized


def _weight_gradient(
    dy: Tensor,
    dy_columns: Quantized | None,
    saved: Sequence[Tensor],
    offsets: Tensor | None,
    recipe: Recipe,
) -> Tensor:
    """Return `dy.T @ x` in float32 or bfloat16. With offsets the shape is `[experts, out, in]`."""
    tile = recipe.activations
    kept = Quantized(saved[0], saved[1], tile) if len(saved) == 2 else None
    with torch.autocast(dy.device.type, enabled=False):
        if recipe.wgrad == "float8":
            if (a := dy_columns) is None:
                a = recipe.quantize(_without_tail(dy, offsets).mT, tile)
            if (b := kept) is None:
                b = recipe.quantize(_without_tail(saved[0], offsets).mT, tile)
            return recipe.gemm(a, b) if offsets is None else recipe.gemm.k_grouped(a, b, offsets)
        x = saved[0] if kept is None else kept.dequantize()
        dtype = torch.float32 if recipe.wgrad == "float32" else torch.bfloat16
        dy, x = dy.to(dtype), x.to(dtype)
        # The kernel needs dense rows of a multiple of 16 bytes. Without it, the host waits.
        fits = dtype is torch.bfloat16 and dy.shape[1] % 8 == 0 == x.shape[1] % 8
        if offsets is not None and dy.is_cuda and fits:
            return F.grouped_mm(dy.contiguous().mT, x.contiguous(), offs=offsets)
        if not dy.is_cuda:
            dy, x = dy.float(), x.float()  # The operands keep their values. Sums are float32.
        if offsets is None:
            return dy.mT @ x
        return torch.stack([dy[rows].mT @ x[rows] for rows in runs(offsets)])


def _checked_offsets(offsets: Tensor, experts: int, tokens: int) -> Tensor:
    """Return int32 offsets. The host does not read their values on a GPU."""
    if offsets.shape != (experts,) or offsets.is_floating_point() or not experts:
        raise ShapeError(
            "offsets must have at least one expert, and for each expert an integer at which its "
            f"rows end; got {experts} experts and offsets {offsets.dtype} {list(offsets.shape)}."
        )
    if offsets.device.type == "cpu":
        ends = offsets.tolist()
        rising = all(start <= end for start, end in zip([0, *ends], ends, strict=False))
        if not rising or ends[-1] > tokens:
            raise ShapeError(f"offsets must rise from 0 to at most {tokens} tokens; got {ends}.")
    return offsets.int().contiguous()


def _check_operands(x: Tensor, weight: Tensor) -> None:
    for name, one in (("x", x), ("the weight", weight)):
        if not one.is_floating_point() or one.element_size() == 1 or not weight.shape[-1]:
            raise ShapeError(
                f"{name} must be floating-point numbers to round to float8; got {one.dtype} "
                f"{list(one.shape)}."
            )
        if local_part(one) is not one:
            raise UnsupportedError(
                f"{name} is a DTensor, whose shards would cut through tiles. Under FSDP2 multiply "
                "inside the layer, where weights are whole; otherwise pass its to_local()."
            )
