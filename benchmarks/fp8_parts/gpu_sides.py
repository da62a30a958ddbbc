"""The sides that `benchmarks.fp8_parts.gpu` compares: engines, a quantizer, torchao."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primeblocks.fp8 import Gemm, Tile, quantize
from primeblocks.fp8.reference import ReferenceGemm

__all__ = [
    "BF16", "FLOAT8_ERROR", "QUANTIZE_ERROR", "ROW", "SMALL", "TORCHAO", "Figures", "Side", "Sizes",
    "assert_close", "draw", "engines_of", "find_torchao", "leave_out", "quantizer_of", "repeat",
]  # fmt: skip

ROW, SQUARE = Tile(1, 128), Tile(128, 128)
BF16, TORCHAO = "bfloat16 in torch", "torchao 0.18.0"
QUANTIZE_ERROR = 0.03  # Of Gaussian values: 2.65 % of their norm.
FLOAT8_ERROR = 2 * 2**0.5 * 0.0265  # Of a product: twice what two such operands, independent, give.

Figures = dict[str, tuple[float, str, str]]
Step = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """Matrices to quantize, a square product, and a layer of experts."""

    rows: int = 65536
    columns: int = 8192
    side: int = 8192
    tokens: int = 65536
    experts: int = 32
    hidden: int = 4096
    out: int = 3072
    repeats: int = 10


SMALL = Sizes(rows=16, columns=256, side=128, tokens=512, experts=3, hidden=128, out=256, repeats=2)


@dataclass(frozen=True)
class Side:
    """What is measured: an engine by name, a quantizer, where, and at which sizes."""

    device: str
    sizes: Sizes
    quantizer: Any
    name: str = ""
    gemm: Any = None


def engines_of(device: str) -> Iterator[tuple[str, Gemm]]:
    if device != "cuda":
        yield "reference", ReferenceGemm()
        return
    triton = _import("primeblocks.fp8.adapters.triton")
    groups = None if triton is None else triton.TritonGemm()
    for name, kind, options in (
        ("cublas", "CublasGemm", {"experts": groups}),
        ("deep_gemm", "DeepGemm", {"k_groups": groups}),
    ):
        module = _import(f"primeblocks.fp8.adapters.{name}")
        try:
            module.check_device(torch.device(device))
            engine = getattr(module, kind)(**options)
            _prove(engine, device)
        except Exception as error:  # A library for another torch may load, and misread its tensors.
            leave_out(name, error)
        else:
            yield name, engine
    if groups is not None:
        yield "triton", groups


def _prove(gemm: Gemm, device: str) -> None:
    x, weight = (draw(128, 128, device=device, seed=seed) for seed in (0, 1))
    a, b = quantize(x, ROW), quantize(weight, SQUARE)
    assert_close(gemm(a, b), x @ weight.mT, FLOAT8_ERROR)


def quantizer_of(device: str) -> Any:
    triton = _import("primeblocks.fp8.adapters.triton") if device == "cuda" else None
    return quantize if triton is None else triton.TritonQuantizer()


@dataclass(frozen=True)
class _Torchao:
    kernels: Any
    step: Callable[[Tensor, Tensor], Tensor]


def find_torchao(device: str) -> _Torchao | None:
    """The prototype of blockwise float8 training, `scaled_mm` beneath, if it is installed."""
    prototype = "torchao.prototype.blockwise_fp8_training"
    if device != "cuda" or _import("torchao") is None:
        return None
    linear = _import(f"{prototype}.linear")
    if linear is None:
        return None
    multiply = linear.fp8_blockwise_mm.apply
    return _Torchao(
        _import(f"{prototype}.kernels"),
        lambda x, weight: multiply(x, weight, ROW.columns, torch.bfloat16, False),
    )


@functools.cache  # What is left out is told once.
def _import(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        leave_out(name, error)
        return None


def leave_out(name: str, error: Exception) -> None:
    print(f"left out: {name}: {error}", file=sys.stderr)


def draw(*shape: int, device: str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def repeat(step: Step, sizes: Sizes) -> Step:
    """So often that a launch, and the wait at the end, are small beside the work."""

    def repeated() -> None:
        for _ in range(sizes.repeats):
            step()

    return repeated


def assert_close(result: Tensor, expected: Tensor, error: float) -> None:
    off = float((result.float() - expected.float()).norm() / expected.float().norm())
    assert off <= error, f"the relative error is {off}, over {error}"
