"""Quantising, dense products and a dense layer's step; see `benchmarks.fp8_parts.gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from primeblocks.fp8 import Quantized, Recipe, matmul, quantize
from primeblocks.fp8.matmul import quantize_both_ways

from ..harness import compare, copy_bandwidth
from .gpu_sides import (
    BF16,
    FLOAT8_ERROR,
    QUANTIZE_ERROR,
    ROW,
    TORCHAO,
    Figures,
    Side,
    Step,
    assert_close,
    draw,
    find_torchao,
    repeat,
)  # fmt: skip

__all__ = ["of_a_product", "of_a_step", "of_quantizing", "quantize_bytes", "step_flops"]


def quantize_bytes(rows: int, columns: int, *, ways: int) -> int:
    """Bytes that quantising bfloat16 moves: read once, and a code and its share of a scale a way.

    Args:
        ways: 1 for rows, 2 for rows and columns.
    """
    return rows * columns * 2 + ways * (rows * columns + 4 * rows * columns // ROW.columns)


def step_flops(tokens: int, inner: int, out: int) -> int:
    """Operations of a layer's forward and backward: three products, each of the same size."""
    return 3 * 2 * tokens * inner * out


def of_quantizing(side: Side) -> Figures:
    device, sizes, quantizer = side.device, side.sizes, side.quantizer
    quantize_both = Recipe(quantizer=quantizer).quantize_both
    x = draw(sizes.rows, sizes.columns, device=device, seed=0)
    how = {"scale": "float32", "quotient": "reciprocal", "nonfinite": "nan"}
    torchao = find_torchao(device)

    def agree() -> None:
        both = quantize_both(x, ROW)
        for ours, matrix in ((quantizer(x, ROW, **how), x), (both[0], x), (both[1], x.mT)):
            expected = quantize(matrix, ROW, **how)
            assert torch.equal(ours.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(ours.scales, expected.scales)
        if torchao is not None:
            codes, scales = torchao.kernels.triton_fp8_blockwise_act_quant_lhs(x, ROW.columns)
            assert_close(Quantized(codes, scales.contiguous(), ROW).dequantize(), x, QUANTIZE_ERROR)

    steps = [lambda: quantizer(x, ROW, **how), lambda: quantize_both(x, ROW)]
    if torchao is not None:
        steps.append(lambda: torchao.kernels.triton_fp8_blockwise_act_quant_lhs(x, ROW.columns))
    rows, both, *theirs = compare(*(repeat(step, sizes) for step in steps), agree=agree)
    bandwidth = copy_bandwidth(device=device, size_bytes=x.nbytes) / sizes.repeats
    found: Figures = {}
    for name, ways, timing in (("quantize", 1, rows), ("quantize_both_ways", 2, both)):
        moved = quantize_bytes(sizes.rows, sizes.columns, ways=ways)
        share = moved / timing.median / bandwidth
        found[f"fp8.{name}.gpu.copy_bandwidth_fraction"] = share, "ratio", "torch copy_"
        found[f"fp8.{name}.gpu.spread"] = timing.spread, "ratio", ""
    for timing in theirs:
        ratio = timing.median / rows.median
        found["fp8.quantize.gpu.speedup_vs_torchao"] = ratio, "ratio", TORCHAO
    return found


def of_a_product(side: Side) -> Figures:
    device, sizes, gemm = side.device, side.sizes, side.gemm
    recipe = Recipe(gemm=gemm, quantizer=side.quantizer)
    x, weight = (draw(sizes.side, sizes.side, device=device, seed=seed) for seed in (0, 1))
    a, b = recipe.quantize(x, ROW), recipe.quantize_weight(weight)

    def agree() -> None:
        assert_close(gemm(a, b), x @ weight.mT, FLOAT8_ERROR)

    steps = (lambda: gemm(a, b), lambda: gemm(recipe.quantize(x, ROW), b), lambda: x @ weight.mT)
    ours, within, plain = compare(*(repeat(step, sizes) for step in steps), agree=agree)
    question, each = f"fp8.dense_{sizes.side}", 2 * sizes.side**3 * sizes.repeats
    return {
        f"{question}.gpu.speedup_vs_bf16": (plain.median / ours.median, "ratio", BF16),
        f"{question}_quantizing.gpu.speedup_vs_bf16": (
            plain.median / within.median, "ratio", BF16,
        ),
        f"{question}.gpu.tflops": (each / ours.median / 1e12, "TFLOP/s", side.name),
        f"{question}.gpu.bf16_tflops": (each / plain.median / 1e12, "TFLOP/s", BF16),
        f"{question}.gpu.spread": (ours.spread, "ratio", ""),
    }  # fmt: skip


def of_a_step(side: Side, wgrad: str) -> Figures:
    """Forward and backward; against torchao, weights are rounded each time, as it does."""
    device, sizes = side.device, side.sizes
    recipe = Recipe(gemm=side.gemm, quantizer=side.quantizer, wgrad=wgrad)  # type: ignore[arg-type]
    x, weight, dy = (draw(sizes.side, sizes.side, device=device, seed=n) for n in range(3))
    codes = quantize_both_ways(weight, recipe)
    leaves = x.requires_grad_(), weight.requires_grad_()

    def step(function: Callable[..., Tensor], **options: Any) -> Step:
        return lambda: torch.autograd.grad(function(x, weight, **options), leaves, dy)

    steps = [
        step(matmul, recipe=recipe, codes=codes),
        step(F.linear),
        step(matmul, recipe=recipe),
    ]
    torchao = find_torchao(device)
    if torchao is not None and wgrad == "float8":  # As its own is.
        steps.append(step(torchao.step))

    def agree() -> None:
        expected = steps[1]()
        for one in steps:
            for gradient, right in zip(one(), expected, strict=True):
                assert_close(gradient, right, FLOAT8_ERROR)

    timings = compare(*(repeat(one, sizes) for one in steps), agree=agree)
    fast, bf16, rounding, *theirs = timings
    question = "fp8.dense_fwd_bwd.gpu"
    rate = step_flops(sizes.side, sizes.side, sizes.side) * sizes.repeats / fast.median / 1e12
    found = {
        f"{question}.speedup_vs_bf16": (bf16.median / fast.median, "ratio", BF16),
        f"{question}.tflops": (rate, "TFLOP/s", side.name),
    }
    for timing in theirs:
        ratio = timing.median / rounding.median
        found[f"{question}.speedup_vs_torchao"] = ratio, "ratio", TORCHAO
    return found
