"""A step of experts, and the gradient of their weights; see `benchmarks.fp8_parts.gpu`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from primeblocks.errors import UnsupportedError
from primeblocks.fp8 import Recipe, grouped_matmul, matmul, swiglu_matmul
from primeblocks.fp8.matmul import quantize_both_ways
from primeblocks.fp8.quantize import swiglu

from ..harness import compare
from .gpu_dense import step_flops
from .gpu_sides import FLOAT8_ERROR, ROW, Figures, Side, assert_close, draw, leave_out, repeat

__all__ = ["of_experts", "of_swiglu", "of_wgrad"]


def of_experts(side: Side, wgrad: str) -> Figures:
    sizes = side.sizes
    recipe = Recipe(gemm=side.gemm, quantizer=side.quantizer, wgrad=wgrad)  # type: ignore[arg-type]
    x, experts, dy, offsets = _layer(side)
    codes = quantize_both_ways(experts, recipe)
    leaves = x.requires_grad_(), experts.requires_grad_()

    def ours() -> tuple[Tensor, ...]:
        y = grouped_matmul(x, experts, offsets, recipe=recipe, codes=codes)
        return torch.autograd.grad(y, leaves, dy)

    def plain() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.grouped_mm(x, experts.mT, offs=offsets), leaves, dy)

    def agree() -> None:
        for one, other in zip(ours(), plain(), strict=True):
            assert_close(one, other, FLOAT8_ERROR)

    try:
        agree()
    except UnsupportedError as error:
        leave_out(f"{side.name} with wgrad={wgrad!r}", error)
        return {}
    fast, bf16 = compare(repeat(ours, sizes), repeat(plain, sizes), agree=agree)
    rate = step_flops(len(x), sizes.hidden, sizes.out) * sizes.repeats / fast.median / 1e12
    question = "fp8.grouped_fwd_bwd.gpu"
    return {
        f"{question}.speedup_vs_bf16": (bf16.median / fast.median, "ratio", "F.grouped_mm"),
        f"{question}.tflops": (rate, "TFLOP/s", side.name),
        f"{question}.spread": (fast.spread, "ratio", ""),
    }


def of_wgrad(side: Side) -> Figures:
    """The gradient of experts' weights: the product alone, and with both operands quantized."""
    sizes, gemm = side.sizes, side.gemm
    recipe = Recipe(gemm=gemm, quantizer=side.quantizer)
    x, _, dy, offsets = _layer(side)
    a, b = recipe.quantize(dy.mT, ROW), recipe.quantize(x.mT, ROW)

    def quantizing() -> Tensor:
        return gemm.k_grouped(recipe.quantize(dy.mT, ROW), recipe.quantize(x.mT, ROW), offsets)

    def agree() -> None:
        assert_close(gemm.k_grouped(a, b, offsets), _plain_wgrad(dy, x, offsets), FLOAT8_ERROR)

    steps = (
        lambda: gemm.k_grouped(a, b, offsets),
        quantizing,
        lambda: _plain_wgrad(dy, x, offsets),
    )
    alone, within, plain = compare(*(repeat(step, sizes) for step in steps), agree=agree)
    flops = 2 * len(x) * sizes.hidden * sizes.out * sizes.repeats
    return {
        "fp8.wgrad.gpu.tflops": (flops / alone.median / 1e12, "TFLOP/s", ""),
        "fp8.wgrad.gpu.bf16_tflops": (flops / plain.median / 1e12, "TFLOP/s", "F.grouped_mm"),
        "fp8.wgrad.gpu.speedup_vs_bf16": (plain.median / alone.median, "ratio", "F.grouped_mm"),
        "fp8.wgrad_quantizing.gpu.speedup_vs_bf16": (
            plain.median / within.median, "ratio", "F.grouped_mm",
        ),
    }  # fmt: skip


def of_swiglu(side: Side) -> Figures:
    """A product behind a SwiGLU, forward and backward: fused, one after the other, and bfloat16."""
    device, sizes = side.device, side.sizes
    recipe = Recipe(gemm=side.gemm, quantizer=side.quantizer, wgrad="bfloat16")
    gate_up = draw(sizes.tokens, 2 * sizes.hidden, device=device, seed=4)
    weight = draw(sizes.out, sizes.hidden, device=device, seed=5)
    dy = draw(sizes.tokens, sizes.out, device=device, seed=6)
    codes = quantize_both_ways(weight, recipe)
    leaves = gate_up.requires_grad_(), weight.requires_grad_()

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, dy)

    def plain() -> tuple[Tensor, ...]:
        gate, up = gate_up.chunk(2, dim=-1)
        return gradients(F.linear(F.silu(gate) * up, weight))

    steps = (
        lambda: gradients(swiglu_matmul(gate_up, weight, recipe=recipe, codes=codes)),
        lambda: gradients(matmul(swiglu(gate_up), weight, recipe=recipe, codes=codes)),
        plain,
    )

    def agree() -> None:
        for step in steps[:2]:
            for one, other in zip(step(), plain(), strict=True):
                assert_close(one, other, FLOAT8_ERROR)

    fused, apart, bf16 = compare(*(repeat(step, sizes) for step in steps), agree=agree)
    question = "fp8.swiglu_fwd_bwd.gpu"
    return {
        f"{question}.speedup_vs_bf16": (bf16.median / fused.median, "ratio", "silu and linear"),
        f"{question}.speedup_vs_apart": (apart.median / fused.median, "ratio", "not fused"),
    }


def _plain_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(dy.mT, x, offs=offsets)


def _layer(side: Side) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, experts, the output's gradient, and uneven groups in multiples of 128."""
    device, sizes = side.device, side.sizes
    generator = torch.Generator().manual_seed(3)
    blocks = sizes.tokens // 128
    of = torch.randint(sizes.experts, (blocks,), generator=generator)
    offsets = 128 * torch.bincount(of, minlength=sizes.experts).cumsum(0)
    return (
        draw(128 * blocks, sizes.hidden, device=device, seed=0),
        draw(sizes.experts, sizes.out, sizes.hidden, device=device, seed=1),
        draw(128 * blocks, sizes.out, device=device, seed=2),
        offsets.int().to(device),
    )
