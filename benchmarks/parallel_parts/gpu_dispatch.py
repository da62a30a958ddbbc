"""Tokens to experts and back on a CUDA device: `python -m benchmarks.parallel_parts.gpu_dispatch`.

It has run on one H100 (docs/gpu.md).
With `--dry-run` its code runs on a CPU, at sizes that say nothing about speed.

One rank with all 128 experts of Qwen3-30B-A3B, 8 of which each of 32,768 tokens of 2,048 numbers
chooses: dispatch and combine, forward and backward, bfloat16, against copies of the rows that they
move. Counted: waits of the host, of which each leaves the device idle. Experts that return what
they get must give back each token, weighted by the sum of its scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from primeblocks.parallel.experts import LocalDispatcher

from ..harness import compare, main

__all__ = ["SMALL", "Sizes", "figures", "host_waits"]

Figures = dict[str, tuple[float, str, str]]
# Of the norm: rows, and sums of eight of them, are rounded to 8 bits.
BF16_ERROR = 0.01


@dataclass(frozen=True)
class Sizes:
    """A layer of experts and its tokens."""

    tokens: int = 32768
    width: int = 2048
    experts: int = 128
    top_k: int = 8


SMALL = Sizes(tokens=64, width=16, experts=8, top_k=2)


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Figures:
    """Milliseconds, the share of copy bandwidth, and waits of the host.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.parallel_parts.gpu_dispatch needs a CUDA device")
    sizes = sizes or Sizes()
    generator = torch.Generator(device).manual_seed(0)
    lots = torch.rand(sizes.tokens, sizes.experts, generator=generator, device=device)
    scores, ids = lots.topk(sizes.top_k, dim=1)
    scores = scores.bfloat16().requires_grad_()
    x = torch.randn(sizes.tokens, sizes.width, generator=generator, device=device)
    x = x.bfloat16().requires_grad_()
    dispatcher = LocalDispatcher(check=False)

    def forward() -> Tensor:
        sent = dispatcher.dispatch(x, scores, ids, num_experts=sizes.experts)
        return dispatcher.combine(sent.tokens, sent)

    def both() -> tuple[Tensor, ...]:
        out = forward()
        return torch.autograd.grad(out, (x, scores), out)

    rows = x.detach().repeat(sizes.top_k, 1)
    into = torch.empty_like(rows)

    @torch.no_grad()
    def agree() -> None:
        right = x.detach().double() * scores.detach().double().sum(1, keepdim=True)
        off = float((forward().double() - right).norm() / right.norm())
        assert off <= BF16_ERROR, f"the relative error is {off}, over {BF16_ERROR}"

    one, two, copy = compare(forward, both, lambda: into.copy_(rows), agree=agree)
    name = "parallel.dispatch.gpu"
    # Out, and back: rows are read and written once each way; the backward does both again.
    return {
        f"{name}.forward_ms": (1e3 * one.median, "ms", ""),
        f"{name}.forward_backward_ms": (1e3 * two.median, "ms", ""),
        f"{name}.forward.copy_bandwidth_fraction": (2 * copy.median / one.median, "ratio", "copy_"),
        f"{name}.forward.spread": (one.spread, "ratio", ""),
        f"{name}.host_waits": (host_waits(both), "count", ""),
    }


def host_waits(step: Callable[[], object]) -> float:
    """Count the times that a step waits for the device; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return float(sum("synchroniz" in str(each.message) for each in seen))


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))
