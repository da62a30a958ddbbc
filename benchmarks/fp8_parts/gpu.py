"""Float8 on a CUDA device: `python -m benchmarks.fp8_parts.gpu`.

It has run on one H100 (docs/gpu.md).
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

Each engine that the machine has is a row of its own; the figure without an engine's name is that of
the first, in the order of `primeblocks.fp8.adapters`. An engine or a peer that is not there is
named, with the reason, and left out. Nothing is timed before results agree.

- Quantising 1 GB of bfloat16 in tiles of 1 x 128, and both ways at once, against a plain copy: the
  bytes read and written in a second, scales included.
- A dense product of 8192 x 8192 x 8192 against `torch.mm` in bfloat16, with the left operand
  quantized before and within; a step, forward and backward, against torch's and torchao's.
- A step of 32 experts over 65536 tokens, weights quantized once a version as they are in training,
  against `grouped_mm` in bfloat16.
- A product behind a SwiGLU, fused and not, and the gradient of experts' weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from ..harness import main
from .gpu_dense import of_a_product, of_a_step, of_quantizing
from .gpu_experts import of_experts, of_swiglu, of_wgrad
from .gpu_sides import SMALL, Figures, Side, Sizes, engines_of, quantizer_of

__all__ = ["figures"]


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Figures]:
    """All that the device and its packages allow.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.fp8_parts.gpu needs a CUDA device")
    plain = Side(device, sizes or Sizes(), quantizer_of(device))
    sides = [replace(plain, name=name, gemm=gemm) for name, gemm in engines_of(device)]
    yield of_quantizing(plain)
    for side in sides:
        yield _named(of_a_product(side), side.name, first=side is sides[0])
    # cuBLAS leaves groups to another engine.
    grouped = [side for side in sides if side.name != "cublas"]
    for side in sides:
        yield _named(of_swiglu(side), side.name, first=side is sides[0])
    for measure, those in ((of_a_step, sides), (of_experts, grouped)):
        for side in those:
            for wgrad in ("bfloat16", "float8"):
                first = side is those[0] and wgrad == "bfloat16"
                yield _named(measure(side, wgrad), f"{side.name}.wgrad_{wgrad}", first=first)
    for side in grouped:
        if side.name != "deep_gemm":
            yield of_wgrad(side)


def _named(rows: Figures, name: str, *, first: bool) -> Figures:
    """File rows under an engine's name, and under none if it is the first."""
    found: Figures = {}
    for row, value in rows.items():
        question, quantity = row.rsplit(".", 1)
        found[f"{question}.{name}.{quantity}"] = value
        if first:
            found[row] = value
    return found


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))
