"""Batch-invariant kernels on a CUDA device: `python -m benchmarks.exact_gpu`.

It has never run on a GPU. With `--dry-run` its code runs on a CPU, with the kernels of a CPU and at
sizes that say nothing about speed.

A product of bfloat16 and causal attention over one sequence, next to torch's functions. Nothing is
timed before a few rows alone have the bits that they have in the whole, and both results agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from primeblocks.exact import Kernels, cpu

from .harness import Figures, compare, main

__all__ = ["figures"]

HEADS, GROUPS, WIDTH = 32, 8, 128
ERROR = 0.01  # of the norm: a result is rounded to 8 bits


def figures(device: str = "cuda", side: int = 8192, tokens: int = 8192) -> Iterator[Figures]:
    """Yield the rates of a product and of attention.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.exact_gpu needs a CUDA device")
    kernels = _kernels(device)
    draw = partial(_draw, device)
    left, right = draw(side, side), draw(side, side)
    yield _rates(
        f"product.{side}",
        lambda chosen: kernels.matmul(left[chosen], right),
        lambda: left @ right,
        2 * side**3,
    )
    query = draw(tokens, HEADS, WIDTH)
    key, value = draw(tokens, GROUPS, WIDTH), draw(tokens, GROUPS, WIDTH)
    at, scale = torch.arange(tokens, device=device), WIDTH**-0.5
    heads_first = [each.transpose(0, 1)[None] for each in (query, key, value)]

    def attend(chosen: slice) -> Tensor:
        return kernels.attend(query[chosen], key, value, positions=at[chosen], scale=scale)

    def torchs() -> Tensor:
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    flops = 2 * HEADS * WIDTH * tokens**2  # of the half that is seen
    yield _rates(f"attention.{tokens}_tokens", attend, torchs, flops)


def _kernels(device: str) -> Kernels:
    if device == "cpu":
        return cpu
    from primeblocks.exact.adapters import triton

    return triton


def _draw(device: str, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(len(shape))
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def _rates(
    name: str, ours: Callable[[slice], Tensor], theirs: Callable[[], Tensor], flops: int
) -> Figures:
    whole = slice(None)

    def agree() -> None:
        found, right = ours(whole), theirs()
        off = float((found - right).float().norm() / right.float().norm())
        assert off <= ERROR, f"{name} is off by {off:.2g}; {ERROR} is allowed"
        for some in (slice(1), slice(3, 40), slice(len(found) - 1, None)):
            assert torch.equal(ours(some), found[some]), f"rows of {name} depend on the batch"

    mine, torchs = compare(partial(ours, whole), theirs, agree=agree)
    row = f"exact.gpu.{name}"
    return {
        f"{row}.tflops": (flops / mine.median / 1e12, "TFLOP/s", ""),
        f"{row}.time_ratio_vs_torch": (mine.median / torchs.median, "ratio", "torch"),
        f"{row}.spread": (mine.spread, "ratio", ""),
    }


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", 96, 80))
